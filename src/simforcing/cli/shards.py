"""What `--shard 1/4` means."""

from simforcing.errors import SimForcingError


def parse_shard(text: str) -> tuple[int, int]:
    """The two numbers of `1/4`. Raises SimForcingError for anything else."""
    part, slash, count = text.partition("/")
    if not (slash and part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise SimForcingError(f"--shard {text}: give i/n with i from 1 to n, such as 1/4")
    return int(part), int(count)
