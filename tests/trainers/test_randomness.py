import torch

from trainers.data.randomness import below, epoch_order, key, random_bits


def test_the_mixing_function_gives_the_published_splitmix64_numbers() -> None:
    first = random_bits(0, torch.tensor([1, 2, 3]))
    assert [value & (2**64 - 1) for value in first.tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_the_order_of_an_epoch_never_changes_between_versions() -> None:
    assert epoch_order(0, 0, 8).tolist() == [3, 0, 1, 5, 2, 7, 4, 6]
    assert epoch_order(7, 3, 8).tolist() == [2, 5, 6, 0, 4, 3, 1, 7]


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    first, second = epoch_order(0, 0, 1000), epoch_order(0, 1, 1000)
    assert first.sort().values.equal(torch.arange(1000))
    assert not first.equal(second)


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    assert len({key(1, 2), key(2, 1), key(1, 2, 0), key(1, 3), key(0, 2)}) == 5


def test_numbers_below_a_limit_are_spread_evenly() -> None:
    bits = random_bits(key(5), torch.arange(90_000))
    for shift in (0, 24, 40):
        counts = below(bits, shift, 9).bincount(minlength=9)
        assert counts.numel() == 9
        assert (counts - 10_000).abs().max() < 500  # five standard deviations
