"""Block-sparse layers for JAX: functions of arrays, and modules for flax and equinox on top."""
from .linear import linear
from .tables import Tables, tables_of
