"""Few configurations in which every pair of option values meets: a covering array, built greedily."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any, TypeAlias

Axes: TypeAlias = Mapping[str, Sequence[Any]]  # option -> its values
Config: TypeAlias = dict[str, Any]  # option -> one of them
Group: TypeAlias = tuple[tuple[str, Any], ...]  # some options with a value each, in the order of the axes


def covering(
    axes: Axes,
    valid: Callable[[Config], bool],
    *,
    strength: int = 2,
    times: int = 1,
    apart: Collection[set[str]] = (),
) -> list[Config]:
    """Configurations in which each valid group of `strength` option values occurs at least so many times.

    apart: sets of options of which no group need be whole. valid: whether option values go together; it is
    asked of parts of a configuration too, and each part that it allows must have a whole that it allows. The
    same result each time.
    """
    random = Random(0)
    missing = Counter(
        {
            group: times
            for group in groups(axes, strength)
            if valid(dict(group)) and not any(options <= {name for name, _ in group} for options in apart)
        }
    )
    configs: list[Config] = []
    while missing:
        config = dict(next(iter(missing)))
        for name in random.sample(list(axes), len(axes)):
            if name not in config:
                choices = [v for v in axes[name] if valid({**config, name: v})]
                random.shuffle(choices)
                config[name] = max(choices, key=lambda v: _gain(axes, config, name, v, missing, strength))
        config = {name: config[name] for name in axes}
        configs.append(config)
        missing -= Counter(combinations(config.items(), strength))
    return configs


def groups(axes: Axes, strength: int) -> Iterator[Group]:
    """Every `strength` options with every choice of their values."""
    for names in combinations(axes, strength):
        for values in product(*(axes[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def can_be(axes: Axes, valid: Callable[[Config], bool], group: Group) -> bool:
    """Whether some whole configuration with these values is valid: all are tried."""
    fixed = {name: [value] for name, value in group}
    return any(
        valid(dict(zip(axes, values, strict=True))) for values in product(*({**axes, **fixed}).values())
    )


def sample(axes: Axes, valid: Callable[[Config], bool], n: int) -> list[Config]:
    """So many different valid configurations, drawn evenly. The same each time."""
    random = Random(1)
    drawn: dict[tuple[Any, ...], Config] = {}
    while len(drawn) < n:
        config = {name: random.choice(values) for name, values in axes.items()}
        if valid(config):
            drawn.setdefault(tuple(config.values()), config)
    return list(drawn.values())


def _gain(
    axes: Axes, config: Config, name: str, value: Any, missing: Mapping[Group, int], strength: int
) -> int:
    """Groups still missing that a value would add to the options chosen so far."""
    order = list(axes)
    others = combinations(config.items(), strength - 1)
    found = (sorted([*other, (name, value)], key=lambda pair: order.index(pair[0])) for other in others)
    return sum(missing.get(tuple(group), 0) > 0 for group in found)
