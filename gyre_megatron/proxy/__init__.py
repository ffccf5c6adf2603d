"""The HTTP face that harnesses call: dialects, sessions, call roles; every call recorded token by
token."""
