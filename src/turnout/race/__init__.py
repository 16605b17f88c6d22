"""turnout race: a stock model against the same model accelerated, side by side."""
