"""The settings of a model's folder, from both of its files.

In: the folder. Out: `Settings`. Invariant: where both files speak of one thing, ours (`tilefuse.toml`) is followed.
"""

from pathlib import Path

from runtime.server.config_pbtxt import read_config
from runtime.server.config_toml import read_toml
from runtime.server.settings import Settings, SettingsError

FILES = ("config.pbtxt", "tilefuse.toml")


def read_settings(folder: Path) -> Settings:
    """The settings of the model in `folder`.

    Raises:
        SettingsError: a file cannot be parsed or asks for something that this server does not do.
    """
    pbtxt, toml = (folder / name for name in FILES)
    found = read_config(pbtxt) if pbtxt.is_file() else {}
    found |= read_toml(toml) if toml.is_file() else {}
    settings = Settings(**found)
    if settings.padding is not None and settings.max_batch_size == 0:
        raise SettingsError(f"{toml}: padding needs a max_batch_size above 0 in config.pbtxt: it is there to batch")
    return settings
