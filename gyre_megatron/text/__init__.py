"""Between messages and token ids: chat templates and their proof, tool formats, output parsers.
Pure."""
