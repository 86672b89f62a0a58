"""The pages' templates."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
from functools import cache

import jinja2


def render_page(template: str, **values: object) -> str:
    """Fill a template of this package's folder `templates`; a value that it lacks is an error, text is escaped."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("nightbridge.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
