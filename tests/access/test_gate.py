"""Who a caller is: by token, by certificate, by a proxy's word; and what is refused."""

import pytest

from jserve.access.auth_file import check_tenant
from jserve.access.gate import Caller, Credentials, Gate, require_admin
from jserve.config import ConfigError, ServerSection
from jserve.request import Code, RequestError
from tests.support.auth import BLUE, RED, ROOT, auth_file


def seen(token=None, tenant=None, names=()):
    return Credentials([] if token is None else [f"Bearer {token}"], [] if tenant is None else [tenant], names)


@pytest.fixture
def with_tokens(tmp_path):
    return Gate(ServerSection(auth_file=auth_file(tmp_path), tls_client_ca="ca.pem", trusted_proxies="edge, edge2"))


def refusal(gate, credentials) -> Code:
    with pytest.raises(RequestError) as caught:
        gate.caller(credentials)
    assert not {RED, BLUE, ROOT} & set(str(caught.value).split())
    return caught.value.code


def test_without_any_settings_everybody_may_do_everything():
    gate = Gate(ServerSection())
    assert gate.caller(seen()) == gate.caller(seen("a key that a client always sends")) == Caller(None, True)
    assert refusal(gate, seen(tenant="red")) is Code.PERMISSION_DENIED


def test_a_token_tells_tenant_and_role(with_tokens):
    assert with_tokens.caller(seen(RED)) == Caller("red", False)
    assert with_tokens.caller(seen(ROOT)) == Caller("ops", True)
    assert with_tokens.caller(Credentials(["bearer  " + BLUE])) == Caller("blue", False)


@pytest.mark.parametrize("authorization", [
    [], ["Bearer wrong"], [f"Bearer {RED}x"], [f"Basic {RED}"], [RED], ["Bearer"], [""],
    [f"Bearer {RED}", f"Bearer {BLUE}"]])
def test_no_token_or_a_wrong_one_is_unauthenticated(with_tokens, authorization):
    assert refusal(with_tokens, Credentials(authorization, (), ("somebody",))) is Code.UNAUTHENTICATED


def test_a_certificate_tells_the_tenant_where_no_tokens_are_used():
    gate = Gate(ServerSection(tls_client_ca="ca.pem", trusted_proxies="edge"))
    assert gate.caller(seen(names=("red", "red.test"))) == Caller("red", True)
    assert gate.caller(seen(names=("John Smith", "js.test"))) == Caller("John%20Smith", True)
    assert gate.caller(seen(names=("spiffe://mesh/ns/red",))) == Caller("spiffe://mesh/ns/red", True)
    long_names = {gate.caller(seen(names=("é" * 100 + end,))).tenant for end in ("", "x", "y")}
    assert len(long_names) == 3 and all(check_tenant(name) for name in long_names)
    assert refusal(gate, seen()) is Code.UNAUTHENTICATED, "a certificate that names nobody"
    assert gate.caller(seen(names=("edge",), tenant="blue")) == Caller("blue", True)


def test_a_tenant_in_metadata_is_believed_from_a_proxy_only(with_tokens):
    assert with_tokens.caller(seen(names=("edge",), tenant="blue")) == Caller("blue", False)
    assert with_tokens.caller(seen(ROOT, names=("x", "edge2"), tenant="blue")) == Caller("blue", True)
    assert refusal(with_tokens, seen("wrong", names=("edge",), tenant="blue")) is Code.UNAUTHENTICATED
    assert refusal(with_tokens, seen(names=("edge",))) is Code.UNAUTHENTICATED
    assert refusal(with_tokens, seen(RED, tenant="blue")) is Code.PERMISSION_DENIED
    assert refusal(with_tokens, seen(RED, names=("edge.evil",), tenant="blue")) is Code.PERMISSION_DENIED
    assert refusal(with_tokens, seen(names=("edge",), tenant="a b")) is Code.INVALID_ARGUMENT
    assert with_tokens.caller(seen(RED, tenant="red")) == Caller("red", False), "what it is anyway"


def test_admin_is_asked_for_by_name():
    require_admin(Caller("ops", True), "Drain")
    with pytest.raises(RequestError, match="Drain needs a token with the role admin") as caught:
        require_admin(Caller("red", False), "Drain")
    assert caught.value.code is Code.PERMISSION_DENIED


def test_settings_under_which_nobody_could_call_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="so nobody could call"):
        Gate(ServerSection(auth_file=auth_file(tmp_path, tokens="")))
    with pytest.raises(ConfigError, match="proxies are known by their client certificates"):
        Gate(ServerSection(auth_file=auth_file(tmp_path), trusted_proxies="edge"))


def test_a_file_that_loses_its_tokens_lets_nobody_in(tmp_path):
    gate = Gate(ServerSection(auth_file=auth_file(tmp_path)))
    auth_file(tmp_path, tokens="")
    assert refusal(gate, seen(RED)) is refusal(gate, seen()) is Code.UNAUTHENTICATED
