"""``LAYOUT``: how many A and F ranks each node has, such as ``2A2F`` or ``4A1F,4A1F``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ffn_faas.errors import UsageError

_NODE = re.compile(r"(?:(\d+)A)?(?:(\d+)F)?", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """Ranks of one node: Attention takes its first devices, F those after them."""

    attention: int
    ffn: int

    @property
    def attention_devices(self) -> range:
        return range(self.attention)

    @property
    def ffn_devices(self) -> range:
        return range(self.attention, self.attention + self.ffn)


def parse(text: str) -> tuple[Node, ...]:
    """The nodes of a layout. Raises UsageError for what cannot be launched."""
    nodes = []
    for part in text.replace(" ", "").split(","):
        match = _NODE.fullmatch(part)
        node = Node(int(match[1] or 0), int(match[2] or 0)) if match else Node(0, 0)
        if not node.attention and not node.ffn:
            raise UsageError(f"LAYOUT={text}: {part!r} is no node", remedy="such as 2A2F, or 4A1F,4A1F for two nodes")
        nodes.append(node)
    if not any(node.attention for node in nodes) or not any(node.ffn for node in nodes):
        raise UsageError(f"LAYOUT={text} has no rank of one side", remedy="both A and F are needed")
    if len({node.ffn for node in nodes if node.ffn}) > 1:
        raise UsageError(f"LAYOUT={text}: nodes with F ranks need equally many", remedy="such as 4A1F,4A1F")
    return tuple(nodes)
