"""The committed generated code is that of the protos, and the protos keep their own rules."""

import dataclasses
import importlib.util
import re

import pytest
from google.protobuf.descriptor import FieldDescriptor

from jserve.proto_gen import control_pb2, inference_pb2, sampling_pb2
from jserve.request import GenerateRequest, SamplingParams

MODULES = (sampling_pb2, inference_pb2, control_pb2)
MESSAGES = [message for module in MODULES for message in module.DESCRIPTOR.message_types_by_name.values()]


@pytest.fixture(scope="module")
def gen_protos(repository_root):
    pytest.importorskip("grpc_tools")
    spec = importlib.util.spec_from_file_location("gen_protos", repository_root / "tools" / "gen_protos.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_code_describes_the_protos(gen_protos):
    from google.protobuf import descriptor_pb2

    current = descriptor_pb2.FileDescriptorSet.FromString(gen_protos.descriptor_set())
    committed = {module.DESCRIPTOR.name: module.DESCRIPTOR for module in MODULES}
    assert {file.name for file in current.file} == committed.keys()
    for file in current.file:
        described = descriptor_pb2.FileDescriptorProto()
        committed[file.name].CopyToProto(described)
        file.ClearField("source_code_info")
        # protoc writes json_name, the compiled-in descriptor leaves it out.
        assert _without_json_names(file) == _without_json_names(described), f"{file.name}: run tools/gen_protos.py"


def test_generated_files_are_what_this_version_of_grpcio_tools_writes(gen_protos):
    files = gen_protos.generate()
    made_by = [re.findall(r"GRPC_GENERATED_VERSION = .*|Protobuf Python Version: .*", text)
               for text in (files["control_pb2.py"] + files["control_pb2_grpc.py"],
                            "".join((gen_protos.OUTPUT / name).read_text()
                                    for name in ("control_pb2.py", "control_pb2_grpc.py")))]
    if made_by[0] != made_by[1]:
        pytest.skip(f"the committed files are of {made_by[1]}, grpcio-tools here is {made_by[0]}")
    assert gen_protos.stale_files(files) == []


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_every_scalar_tells_unset_from_zero(message):
    for field in message.fields:
        if not field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE:
            assert field.has_presence, field.full_name


def test_every_enum_begins_with_unspecified():
    enums = [enum for module in MODULES for enum in module.DESCRIPTOR.enum_types_by_name.values()]
    assert len(enums) == 3
    for enum in enums:
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{snake}_UNSPECIFIED"


def test_sampling_params_have_the_same_fields_in_proto_and_dataclass():
    assert [field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields] == [
        field.name for field in dataclasses.fields(SamplingParams)]


def test_a_request_has_the_same_fields_in_proto_and_dataclass():
    proto = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    ours = {field.name for field in dataclasses.fields(GenerateRequest)}
    assert proto - ours == {"stream"}, "options of the transport"
    assert ours - proto == {"deadline", "tenant", "pooling"}, "gRPC's own, what a client may not say, what Embed alone asks"


def test_the_services_have_the_methods_that_clients_know():
    methods = {service.full_name: [method.name for method in service.methods]
               for module in (inference_pb2, control_pb2) for service in module.DESCRIPTOR.services_by_name.values()}
    assert methods == {
        "jserve.v1.Inference": ["Generate", "GenerateUnary", "Embed", "Score", "Tokenize", "Detokenize"],
        "jserve.v1.Control": [
            "GetModelInfo", "GetServerInfo", "GetLoads", "Abort", "FlushCache", "SubscribeKvEvents", "LoadLora",
            "UnloadLora", "ListLoras", "StartProfile", "StopProfile", "Drain", "CheckIntegrity"],
    }


def _without_json_names(message):
    for field in getattr(message, "field", ()):
        field.ClearField("json_name")
    for inner in (*getattr(message, "message_type", ()), *getattr(message, "nested_type", ())):
        _without_json_names(inner)
    return message
