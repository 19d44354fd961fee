import pytest

from jserve.cli import config_file, flags
from jserve.config import Config


def parse(*arguments: str):
    parser = flags.Parser(prog="jserve serve")
    flags.add_config_flags(parser, server=True)
    return parser.parse_args(arguments)


def config(*arguments: str) -> Config:
    return flags.config_from(parse(*arguments))


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*arguments)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["try: jserve serve --help"]
    return lines[0].removeprefix("jserve serve: ")


def test_no_flag_is_the_default_config():
    assert config() == Config()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv.block_size", "16"),
        ("--kv.block_size=16",),
        ("--kv.block-size", "16"),
    ],
)
def test_every_setting_is_a_flag_in_each_spelling(arguments):
    assert config(*arguments) == Config().replace("kv", block_size=16)


def test_values_of_every_type():
    assert config("--scheduler.overlap", "false").scheduler.overlap is False
    assert config("--kv.memory_fraction", "0.5").kv.memory_fraction == 0.5
    assert config("--compile.token_buckets", "16,64").compile.token_buckets == (16, 64)
    assert config("--kv.block_size", "auto").kv.block_size is None
    assert config("--model.served_name", "x").model.served_name == "x"


@pytest.mark.parametrize(
    "arguments, section, values",
    [
        (("--model", "m.gguf"), "model", {"path": "m.gguf"}),
        (("-m", "m.gguf"), "model", {"path": "m.gguf"}),
        (("--context", "99"), "model", {"context_length": 99}),
        (("--port", "0"), "server", {"port": 0}),
        (("--host", "::1"), "server", {"host": "::1"}),
        (("--tensor-parallel-size", "4"), "parallel", {"tensor_parallel_size": 4}),
        (("--kv-dtype", "bfloat16"), "kv", {"dtype": "bfloat16"}),
        (("--no-overlap",), "scheduler", {"overlap": False}),
        (("--no-prefix-cache",), "kv", {"prefix_cache": False}),
        (("--forbid-compile",), "compile", {"forbid_compile": True}),
        (("--insecure",), "server", {"insecure": True}),
    ],
)
def test_short_names(arguments, section, values):
    assert config(*arguments) == Config().replace(section, **values)


def test_a_flag_overrides_the_file_and_the_last_flag_wins(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[kv]\nblock_size = 8\nnum_blocks = 5\n")
    result = config("--config", str(path), "--kv.block_size", "16", "--kv.block_size", "32")
    assert (result.kv.block_size, result.kv.num_blocks) == (32, 5)


def test_unknown_flags_suggest_the_nearest(capsys):
    assert refusal(capsys, "--kv.blok_size", "3") == "unknown flag --kv.blok_size; did you mean --kv.block_size?"
    assert refusal(capsys, "--prot", "3") == "unknown flag --prot; did you mean --port?"
    assert refusal(capsys, "--zzz") == "unknown flag --zzz; see `jserve serve --help-all`"
    assert refusal(capsys, "stray") == "unexpected argument 'stray'"


def test_abbreviations_are_not_guessed(capsys):
    assert refusal(capsys, "--kv.block", "3").startswith("unknown flag --kv.block")


def test_bad_values_name_key_value_and_type(capsys):
    assert refusal(capsys, "--kv.block_size", "x") == "kv.block_size = 'x': expected an integer or \"auto\""
    assert refusal(capsys, "--port", "x") == "--port: server.port = 'x': expected an integer"
    assert refusal(capsys, "--scheduler.overlap", "yes") == "scheduler.overlap = 'yes': expected true or false"
    assert refusal(capsys, "--compile.token_buckets", "1,b").startswith(
        "compile.token_buckets = '1,b': expected a list"
    )
    assert refusal(capsys, "--kv.memory_fraction", "inf").startswith("kv.memory_fraction = 'inf': expected a number")


def test_help_all_shows_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help-all")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for setting in config_file.settings():
        assert f"--{setting.key} (default " in text
        assert setting.doc in text


def test_help_stays_short(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "--kv.block_size" not in text and len(text.splitlines()) < 50


def test_config_to_flags_gives_another_process_the_same_config(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[kv]\nblock_size = 8\n")
    arguments = parse(
        "--config", str(path), "--no-overlap", "--compile.token_buckets", "16,64", "--kv.num_blocks", "auto"
    )
    assert config(*flags.config_to_flags(arguments)) == flags.config_from(arguments)
