"""The machine that kernels are made for: a row of the table, this machine as measured before, or as the system says.

Invariant: a measured profile is used only on the kind of machine that it was measured on.
"""

import json
import os
import tempfile
from pathlib import Path

from runtime.options import Options
from tilecore.profile import HardwareProfile, detect_profile, machine_key, profile_named


class ProfileError(Exception):
    """A profile cannot be used; one line that says why and what to do."""


def machine_profile(options: Options) -> HardwareProfile:
    """`TILEFUSE_PROFILE`'s row, else what `tilefuse profile` saved here, else what the system says.

    ProfileError when the row does not exist or the saved file cannot be read.
    """
    if options.profile is not None:
        try:
            return profile_named(options.profile)
        except ValueError as error:
            cards = "; NVIDIA cards are named by --target cuda (H100) and cuda-sm80 (A100)"
            raise ProfileError(f"TILEFUSE_PROFILE: {error}{cards}") from error
    path = saved_path(options)
    if not path.exists():
        return detect_profile()
    try:
        return HardwareProfile.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ProfileError(f"{path} is not a profile ({error}); measure again with `tilefuse profile`") from error


def save_profile(profile: HardwareProfile, options: Options) -> Path:
    """Keep a measured profile for later runs on this kind of machine; the file appears whole."""
    path = saved_path(options)
    write_json(path, profile.to_json())
    return path


def saved_path(options: Options) -> Path:
    """Where the measured profile of this kind of machine is kept."""
    return options.cache / "machines" / f"{machine_key()}.json"


def write_json(path: Path, value: object) -> None:
    """Write a file so that readers see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".json")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(value, indent=1) + "\n")
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
