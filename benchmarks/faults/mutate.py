"""A mutator that keeps JSON valid, so that fuzzing gets past the parser."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2,
    3,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 64),
    10**300,
    0.5,
    -1e300,
    1e-320,
    "",
    "k",
    "v",
    "none",
    "embeddings",
    "hidden:1",
    "hidden:99",
    "F32",
    "BF16",
    "U8",
    "full",
    "\0",
    "../x",
    "\ud800",
    "a" * 300,
    [],
    {},
    [[]],
    [0, 0],
    [0, "k", None],
    [0, "k", [0]],
    {"": None},
)


def mutate(data: bytes, most: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """Changes one place: a value of the JSON in `data` (a header's too), or bytes (`plain`) as
    often."""
    chance = random.Random(seed)
    if len(data) < 3 or chance.random() < 0.4:
        return plain(data, most)
    reader = data[:1]
    length = int.from_bytes(data[1:9], "little") if data[0] % 4 == 1 else None
    start = 1 if length is None else 9
    if data[0] % 4 == 0 and data[1] < 4:
        reader, start = data[:2], 2
    raw, rest = (
        (data[start:], b"")
        if length is None
        else (data[start : start + length], data[start + length :])
    )
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return plain(data, most)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        body = change(body, chance)
    changed = json.dumps(body).encode()
    prefix = b"" if length is None else len(changed).to_bytes(8, "little")
    return (reader + prefix + changed + rest)[:most]


def change(body: Any, chance: random.Random) -> Any:
    """`body` with one value replaced, removed, doubled or moved."""
    spots: list[tuple[Any, Any]] = []
    stack = [body]
    while stack:
        node = stack.pop()
        keys = (
            list(node)
            if isinstance(node, dict)
            else list(range(len(node)))
            if isinstance(node, list)
            else []
        )
        spots += [(node, key) for key in keys]
        stack += [node[key] for key in keys]
    if not spots:
        return deepcopy(chance.choice(VALUES))
    node, key = chance.choice(spots)
    what = chance.randrange(6)
    if what == 0:
        del node[key]
    elif what == 1 and isinstance(node, list):
        node.insert(key, node[key])
    elif what == 2:
        other, place = chance.choice(spots)
        node[key] = json.loads(json.dumps(other[place])) if _holds(other, place) else None
    elif what == 3 and isinstance(node, dict):
        node[chance.choice(("schema", "x", "layers", "heads", "__metadata__", key + "2"))] = (
            node.pop(key)
        )
    elif what == 4 and isinstance(node[key], int):
        node[key] += chance.choice((-1, 1, 7))
    else:
        node[key] = deepcopy(chance.choice(VALUES))
    return body


def _holds(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)
