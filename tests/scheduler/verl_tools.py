"""A tool as verl takes them, by the path of this file."""

from verl.tools.function_tool import function_tool


@function_tool
def get_weather(city: str, days: int) -> str:
    """The weather of the coming days.

    Args:
        city: Where.
        days: How many of them.
    """
    return f"sunny in {city} for {days} days"
