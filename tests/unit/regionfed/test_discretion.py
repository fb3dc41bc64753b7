"""What an error may say to others: never the text of one that may quote data."""

import pytest

from regionfed.discretion import discreet
from regionfed.errors import ContractError, DataError, RunError


@discreet("this device")
def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("red shoes"), DataError("line 3: 'red shoes'")])
def test_an_error_that_may_quote_data_is_told_by_its_type_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError) as caught:
        fail(error)
    said = str(caught.value)
    assert said == f"this device failed ({type(error).__name__}); its own log says why"
    assert caught.value.__cause__ is None
    assert "red shoes" in caplog.text


def test_our_own_errors_are_written_for_others() -> None:
    with pytest.raises(ContractError, match="another layout"):
        fail(ContractError("another layout"))


def test_without_an_error_nothing_is_in_the_way() -> None:
    assert discreet("anybody")(lambda: 3)() == 3
