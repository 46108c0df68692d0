"""What an optimizer knows of blocks that come and go.

- `moments`: begin here; state that follows blocks, and bias correction by the age of each
- `adam`: that correction of Adam and AdamW
- `finite`: leaves out steps whose gradients are not finite
"""
