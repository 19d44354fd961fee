"""`docs/config.md` is what `jserve.config` says today."""

from jserve.cli import config_file
from tools.make_config_reference import TARGET, reference


def test_the_page_is_current():
    assert TARGET.read_text() == reference(), "run python -m tools.make_config_reference"


def test_every_setting_has_a_line_of_doc():
    assert [setting.key for setting in config_file.settings() if not setting.doc] == []


def test_a_key_stands_in_its_section_with_default_and_short_flag():
    page = reference()
    server = page[page.index("## [server]") :]
    assert "| `port` | integer | `50051` | `--port` | gRPC port; 0 picks a free one and prints it. |" in server
    assert "`~/.cache/jserve`" in page


def test_a_pipe_in_a_text_does_not_cut_the_table():
    for line in reference().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 6, line
