"""Variables and command lines as kubelet puts them together; the rules are those of the Kubernetes documentation."""

from __future__ import annotations

import pytest

from ffn_faas.deploy.environment import Sources, command, environment, expand
from ffn_faas.deploy.pods import PodSpec
from ffn_faas.errors import UsageError

POD = PodSpec("pod-0", "space", {"app": "x"}, {}, variables={"LWS_GROUP_SIZE": "2"})
SOURCES = Sources(
    [
        {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"A": "from-map", "B": "b"}},
        {"kind": "Secret", "metadata": {"name": "keys"}, "data": {"k": "c2VjcmV0"}, "stringData": {"plain": "text"}},
    ]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A) and $(B)", "1 and 2"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ('{"x": $(A)}', '{"x": 1}'),
    ],
)
def test_references_are_expanded_as_documented(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_entries_win_over_maps_and_may_refer_to_earlier_ones() -> None:
    container = {
        "name": "c",
        "envFrom": [{"configMapRef": {"name": "settings"}}],
        "env": [
            {"name": "A", "value": "own"},
            {"name": "C", "value": "$(A)/$(B)/$(LWS_GROUP_SIZE)"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "L", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "S", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}},
            {"name": "P", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "plain"}}},
        ],
        "args": ["$(C)", "--x=$(S)"],
    }
    variables = environment(container, POD, SOURCES, "127.1.1.1")
    assert variables == {
        "LWS_GROUP_SIZE": "2", "A": "own", "B": "b", "C": "own/b/2", "IP": "127.1.1.1", "L": "x", "S": "secret",
        "P": "text",
    }  # fmt: skip
    assert command(container, variables) == ["own/b/2", "--x=secret"]


@pytest.mark.parametrize(
    ("container", "named"),
    [
        ({"name": "c", "envFrom": [{"configMapRef": {"name": "nowhere"}}]}, "nowhere"),
        ({"name": "c", "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "no"}}}]}, "no"),
        ({"name": "c", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]}, r"spec\.x"),
    ],
)
def test_what_does_not_exist_is_named(container: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        environment(container, POD, SOURCES, "127.1.1.1")
