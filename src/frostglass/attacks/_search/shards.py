"""How many people are searched together."""

from frostglass.runtime.batching import padded_rows


def people_per_shard(batch: int, multiple: int, rows: int, people: int) -> int:
    """Return the people per shard: enough for a batch, or up to twice that if padding is less.

    A person has `rows` rows, and batches are padded to a `multiple`. The smallest of equally good
    sizes, because shards of about one size keep all workers busy.
    """
    least = max(1, batch // rows)

    def padded(count: int) -> int:
        """Count the rows of all shards."""
        full, rest = divmod(people, count)
        return sum(
            times * len(padded_rows(each * rows, multiple))
            for times, each in ((full, count), (1, rest))
            if each
        )

    return min(range(least, 2 * least), key=padded)
