"""RunSpec, Checkout and Image to LaunchPlan: the flag table, the pinned parser, and what is added by default.

Imports models and errors only. Nothing is started here and no rule is judged here, except that a plan which the pinned
launcher would not take is refused.
"""

from nightbridge.launch.parser_source import known_flags
from nightbridge.launch.plan import make_plan, placeholder_plan

__all__ = ["known_flags", "make_plan", "placeholder_plan"]
