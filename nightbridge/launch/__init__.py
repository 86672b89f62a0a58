"""RunSpec, Checkout and Image to LaunchPlan: the flag table, the pinned parser, and what is added by default.

Imports models and errors only. Nothing is started here and no rule is checked here, except that a plan which the pinned
launcher would reject is refused.
"""
