"""The HTTP dialects: each turns a body into a CallRequest and answers in its own form."""
