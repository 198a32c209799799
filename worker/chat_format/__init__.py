"""Chat formats, which describe how a model writes reasoning and tool calls, and the parser that reads them."""
