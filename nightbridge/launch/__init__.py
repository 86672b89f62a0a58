"""RunSpec, Checkout and Image to LaunchPlan: the flag table, the pinned parser, and what is added by default.

Imports models and errors only. Nothing is started here and no rule is checked here, except that a plan which the pinned
launcher would reject is refused. Python of a checkout is read with `syntax_tree`, and never imported.
"""

import ast
import threading
from typing import Literal, overload

# Python 3.11 counts the depth of `ast.parse` for all threads of a process together: where two tests of a night parse at
# once and the garbage collector lets them take turns, one gets a SystemError (python/cpython#106905, seen with 3.11.7).
_ONE_AT_A_TIME = threading.RLock()  # a finalizer that runs meanwhile may parse, too


@overload
def syntax_tree(source: str) -> ast.Module: ...
@overload
def syntax_tree(source: str, mode: Literal["eval"]) -> ast.Expression: ...
def syntax_tree(source: str, mode: Literal["exec", "eval"] = "exec") -> ast.Module | ast.Expression:
    """Parse a module, or with `mode="eval"` an expression, in one thread at a time.

    Raises:
        SyntaxError: It is not Python.
        ValueError: It holds a null byte.
    """
    with _ONE_AT_A_TIME:
        return ast.parse(source) if mode == "exec" else ast.parse(source, mode="eval")
