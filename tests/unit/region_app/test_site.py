"""A region's own file: what it must say, and that a mistake in it is named."""

from pathlib import Path

import pytest

from region_app.site import FILE, LIMIT_MIB, Site
from regionfed.errors import ConfigurationError

GOOD = """
region = "UK"
folder = "/var/lib/regionfed"
[bridge]
address = "127.0.0.1:9095"
token = "/etc/token"
"""


def load(tmp_path: Path, text: str) -> Site:
    path = tmp_path / "site.toml"
    path.write_text(text, encoding="utf-8")
    return Site.load({FILE: str(path)})


def test_what_it_says(tmp_path: Path) -> None:
    site = load(tmp_path, GOOD)
    assert (site.region, site.folder, site.devices) == ("UK", Path("/var/lib/regionfed"), 0)
    assert site.limit == LIMIT_MIB << 20 and site.bridge.address == "127.0.0.1:9095"
    more = load(tmp_path, "devices = 40\nlimit-mib = 2\n" + GOOD)
    assert (more.devices, more.limit) == (40, 2 << 20)


def test_without_it_the_variable_is_named() -> None:
    with pytest.raises(ConfigurationError, match=FILE):
        Site.load({})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('region = "UK"', "", "region"),
        ('region = "UK"', "region = 1", "region=1"),
        ('region = "UK"', 'region = ""', "region=''"),
        ("[bridge]", "[brigde]", "bridge"),
        ('token = "/etc/token"', "", "token"),
        ('token = "/etc/token"', 'token = "/etc/token"\ntoekn = 1', "toekn"),
        ('region = "UK"', 'region = "UK"\ndevices = -1', "devices=-1"),
        ('region = "UK"', 'region = "UK"\nlimit-mib = true', "limit-mib=True"),
        ("127.0.0.1", "10.0.0.1", "mutual TLS"),
        ("[bridge]", "[bridge", "TOML"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load(tmp_path, GOOD.replace(old, new))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml"):
        Site.load({FILE: str(tmp_path / "none.toml")})
