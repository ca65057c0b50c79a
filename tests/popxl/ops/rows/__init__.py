"""The table of ops: for each, samples, what it means in NumPy, and what it refuses.

`test_rows.py` makes the tests of them. A new op is one more row, in the file of its family; an op without a row makes
the suite fail. What an op means is said with NumPy and `math` alone, never with code of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.popxl.ops.rows.code_copy import CODE_COPY
from tests.popxl.ops.rows.collectives import COLLECTIVES
from tests.popxl.ops.rows.complex import COMPLEX
from tests.popxl.ops.rows.convert import CONVERT
from tests.popxl.ops.rows.cutting import CUTTING
from tests.popxl.ops.rows.elementwise import ELEMENTWISE
from tests.popxl.ops.rows.float8 import FLOAT8
from tests.popxl.ops.rows.graphs import GRAPHS
from tests.popxl.ops.rows.index import INDEX
from tests.popxl.ops.rows.nn import NN
from tests.popxl.ops.rows.norm import NORM
from tests.popxl.ops.rows.random import RANDOM
from tests.popxl.ops.rows.reduce import REDUCE
from tests.popxl.ops.rows.remote import REMOTE
from tests.popxl.ops.rows.resample import RESAMPLE
from tests.popxl.ops.rows.scatter import SCATTER
from tests.popxl.ops.rows.schema import Row
from tests.popxl.ops.rows.shape import SHAPE
from tests.popxl.ops.rows.sorting import SORTING
from tests.popxl.ops.rows.var_updates import VAR_UPDATES
from tests.popxl.ops.rows.windows import WINDOWS

ROWS: Sequence[Row] = [
    *ELEMENTWISE,
    *COMPLEX,
    *CONVERT,
    *REDUCE,
    *SHAPE,
    *CUTTING,
    *INDEX,
    *SCATTER,
    *SORTING,
    *NN,
    *NORM,
    *WINDOWS,
    *RESAMPLE,
    *RANDOM,
    *FLOAT8,
    *VAR_UPDATES,
    *CODE_COPY,
    *COLLECTIVES,
    *GRAPHS,
    *REMOTE,
]
