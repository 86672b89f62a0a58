"""The images between two: those of a registry by their tags, files by their names or else by their dates.

Versions are of one kind where their names differ in numbers alone, as `nemo-26.04.sqsh` and `nemo-26.06.sqsh`, or
`nightly-2026-11-20-4f1c2ab` and `nightly-2026-11-23-90ab12c`: what looks like a commit counts for nothing.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from nightbridge.images.image import NO_CONTAINER, is_path
from nightbridge.images.registry import ImageReference, parse_reference

ListTags = Callable[[ImageReference], Sequence[str]]
"""Every tag of an image."""

_COMMIT = re.compile(r"(?<![0-9a-z])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}(?![0-9a-z])")


def versions_between(good: str, bad: str, list_tags: ListTags) -> tuple[str, ...]:
    """The images after a good one, up to and with a bad one, oldest first; just the bad one where there is no list.

    Args:
        good: The good image, as `container_image` has it: a reference, or the path of a .sqsh file.
        bad: The bad one.
        list_tags: Lists the tags of an image in its registry.

    Raises what `list_tags` raises.
    """
    files = [is_path(one) for one in (good, bad)]
    if all(files):
        return _files_between(Path(good), Path(bad))
    if any(files) or NO_CONTAINER in (good, bad):
        return (bad,)
    ends = [parse_reference(one) for one in (good, bad)]
    before, after = ends
    if (before.registry, before.name) != (after.registry, after.name) or not (before.tag and after.tag):
        return (bad,)
    between = _between(before.tag, after.tag, list_tags(after) if _kind(before.tag) == _kind(after.tag) else ())
    bare = after.model_copy(update={"digest": None})
    return (*(str(bare.model_copy(update={"tag": tag})) for tag in between), bad)


def _files_between(good: Path, bad: Path) -> tuple[str, ...]:
    if good.parent != bad.parent:
        return (str(bad),)
    names = [path.name for path in bad.parent.glob("*.sqsh")]
    if _kind(good.name) == _kind(bad.name):
        between = _between(good.name, bad.name, names)
    else:
        made = {name: (bad.parent / name).stat().st_mtime_ns for name in {*names, good.name, bad.name}}
        first, last = made[good.name], made[bad.name]
        between = sorted((name for name in names if first < made[name] < last), key=made.__getitem__)
    return (*(str(bad.parent / name) for name in between), str(bad))


def _between(good: str, bad: str, names: Sequence[str]) -> list[str]:
    """Names of the ends' own kind that lie between both by their numbers, in their order."""
    first, last = _numbers(good), _numbers(bad)
    own = {name for name in names if _kind(name) == _kind(bad) and first < _numbers(name) < last}
    return sorted(own, key=_numbers)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", _COMMIT.sub("*", name))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", _COMMIT.sub("*", name))]
