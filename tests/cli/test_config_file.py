import dataclasses
from pathlib import Path

import pytest

from jserve.cli import config_file
from jserve.config import Config, ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load(tmp_path, text: str) -> Config:
    path = tmp_path / "jserve.toml"
    path.write_text(text)
    return config_file.load(path)


def test_keys_override_the_defaults_and_leave_the_rest(tmp_path):
    config = load(
        tmp_path, "[kv]\nblock_size = 16\n[compile]\ntoken_buckets = [16, 64]\n[server]\ndrain_timeout_s = 5\n"
    )
    assert config.kv.block_size == 16
    assert config.compile.token_buckets == (16, 64)
    assert config.server.drain_timeout_s == 5.0 and isinstance(config.server.drain_timeout_s, float)
    assert config.kv.prefix_cache is True and config.model == Config().model


def test_auto_is_the_unset_value(tmp_path):
    assert load(tmp_path, '[kv]\nblock_size = "auto"\n[model]\ngeneration_config = "auto"').kv.block_size is None


def test_an_empty_file_is_the_default_config(tmp_path):
    assert load(tmp_path, "") == Config()


@pytest.mark.parametrize(
    "text, message",
    [
        ("[kv]\nblok_size = 16", "unknown key kv.blok_size; did you mean kv.block_size?"),
        ("[kv]\nmax_num_seqs = 16", "unknown key kv.max_num_seqs; did you mean scheduler.max_num_seqs?"),
        ("[kvv]\nblock_size = 16", "unknown section [kvv]; did you mean kv?"),
        ("block_size = 16", "unknown section [block_size]"),
        ("kv = 3", "kv = 3: expected a section"),
        ("[kv]\nblock_size = '16'", "kv.block_size = '16': expected an integer or \"auto\""),
        ("[kv]\nblock_size = true", "kv.block_size = True: expected an integer"),
        ("[kv]\nblock_size = 16.0", "kv.block_size = 16.0: expected an integer"),
        ("[kv]\nprefix_cache = 1", "kv.prefix_cache = 1: expected true or false"),
        ("[kv]\nmemory_fraction = nan", "kv.memory_fraction = nan: expected a number"),
        ("[model]\npath = 3", "model.path = 3: expected a string"),
        ("[compile]\ntoken_buckets = [16, 1.5]", "compile.token_buckets = [16, 1.5]: expected a list of integers"),
        ("[kv\nblock_size = 16", "not valid TOML"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, text)
    assert message in str(refusal.value)
    assert "jserve.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing.toml: cannot read the config file: No such file"):
        config_file.load(tmp_path / "nothing.toml")


def test_every_setting_has_a_line_of_doc_and_a_type():
    for setting in config_file.settings():
        assert setting.doc, setting.key
        assert setting.type in (bool, int, float, str, tuple), setting.key


def test_settings_are_the_fields_of_the_config():
    keys = [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(getattr(Config(), section.name))
    ]
    assert [setting.key for setting in config_file.settings()] == keys


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_the_configs_of_the_repository_load(path):
    assert config_file.load(path) != Config()
