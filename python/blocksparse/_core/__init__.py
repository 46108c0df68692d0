"""The compiled library, and what every front end needs to call it."""
