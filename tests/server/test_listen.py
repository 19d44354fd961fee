"""Where the server may listen, and the one line it says where it cannot."""

import subprocess
import sys

import pytest

from jserve.config import ConfigError
from jserve.server.app import Server
from jserve.server.async_client import AsyncClient
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import config, server_process


async def test_a_port_in_use_is_one_clear_line():
    first = Server(config())
    await first.start()
    try:
        second = Server(config(port=first.port))
        with pytest.raises(ConfigError, match=f"^server.port = {first.port}: already in use on 127.0.0.1; .*--port"):
            await second.start()
        await second.stop()
        async with AsyncClient(first.address) as client:
            first.attach(FakeEngine())
            assert await client.is_serving(), "the first one is as it was"
    finally:
        await first.stop()


def test_a_second_server_process_on_the_port_exits_with_one_line():
    with server_process() as (_, address):
        port = address.rpartition(":")[2]
        second = subprocess.run([sys.executable, "-m", "tests.support.fake_server", "--port", port],
                                capture_output=True, text=True, timeout=20)
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert second.stderr.startswith(f"error: server.port = {port}: already in use")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
async def test_a_host_that_others_can_reach_needs_insecure(host):
    with pytest.raises(ConfigError, match=r"server.host = .* reachable from other machines.*--insecure"):
        Server(config(host=host))


async def test_insecure_allows_any_host():
    server = Server(config(host="0.0.0.0", insecure=True))
    await server.start()
    server.attach(FakeEngine())
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        assert await client.is_serving()
    await server.stop()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_this_machine_is_fine(host):
    server = Server(config(host=host))
    await server.start()
    assert server.address == f"{host}:{server.port}" and server.port > 0
    await server.stop()


@pytest.mark.parametrize(("section", "message"), [
    ({"host": "no-such-host.invalid"}, "server.host = 'no-such-host.invalid': not an address of this machine"),
    ({"host": "192.0.2.1", "insecure": True}, "server.host = '192.0.2.1': Cannot assign requested address"),
])
async def test_an_address_that_is_not_ours_is_one_clear_line(section, message):
    with pytest.raises(ConfigError) as caught:
        await Server(config(**section)).start()
    assert str(caught.value).startswith(message)
