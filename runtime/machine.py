"""The machine that kernels are made for: a row of the table, this machine as measured before, or as the system says.

As many of its cores count as `TILEFUSE_THREADS` or a command has threads: the others do nothing for a call.

Invariant: a measured profile is used only on the kind of machine that it was measured on.
"""

import json
from dataclasses import replace
from pathlib import Path

from runtime.options import Options
from tilecore.profile import HardwareProfile, detect_profile, machine_key, profile_named
from tilecore.records import write_json


class ProfileError(Exception):
    """A profile cannot be used; one line that says why and what to do."""


def machine_profile(options: Options) -> HardwareProfile:
    """`TILEFUSE_PROFILE`'s row, else what `tilefuse profile` saved here, else what the system says.

    It has one core for each of `options.threads`; of this machine's, not more than there are. ProfileError when the
    row does not exist or the saved file cannot be read.
    """
    if options.profile is not None:
        try:
            row = profile_named(options.profile)
            return row if options.threads is None else replace(row, cores=options.threads)
        except ValueError as error:
            cards = "; NVIDIA cards are named by --target cuda (H100) and cuda-sm80 (A100)"
            raise ProfileError(f"TILEFUSE_PROFILE: {error}{cards}") from error
    found = _this_machine(saved_path(options))
    return found if options.threads is None else replace(found, cores=min(options.threads, found.cores))


def _this_machine(path: Path) -> HardwareProfile:
    """What was saved at `path`, else what the system says."""
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
