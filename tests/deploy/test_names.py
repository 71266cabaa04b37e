"""Loopback addresses in place of a cluster's names."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from ffn_faas.deploy import names

from .rendered import OVERLAYS, Overlay


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_has_a_loopback_address_of_its_own(overlay: str) -> None:
    pods = Overlay(overlay).pods
    addresses = names.assign(pods)
    assert set(addresses) == {pod.name for pod in pods}
    assert len(set(addresses.values())) == len(pods)
    assert all(ip_address(address).is_loopback for address in addresses.values())


@pytest.mark.parametrize(("overlay", "leader"), [("local", "ffn-0.ffn.ffn-faas"), ("cpu-statefulset", "ffn-0.ffn")])
def test_the_leader_and_its_service_are_the_first_pod_of_f(overlay: str, leader: str) -> None:
    rendered = Overlay(overlay)
    table = names.resolve(rendered.manifests, rendered.pods, names.assign(rendered.pods, "127.5.5"))
    assert table[leader] == table["ffn-leader"] == table["ffn-leader.ffn-faas.svc"] == "127.5.5.1"
    assert table["attention"] == f"127.5.5.{len(rendered.pods)}"


def test_workers_of_a_group_are_found_by_their_own_names() -> None:
    rendered = Overlay("local")
    table = names.resolve(rendered.manifests, rendered.pods, names.assign(rendered.pods, "127.5.5"))
    assert table["ffn-0-1.ffn.ffn-faas"] == "127.5.5.2"
