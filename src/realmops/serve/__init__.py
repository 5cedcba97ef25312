"""The server: answers over HTTP, the page, and tools for assistants by the Model Context Protocol."""

BODY_LIMIT = 1 << 20  # bytes of a request
QUESTIONS_LIMIT = 64  # per request
WAITING = 256  # accepted and unanswered questions of all requests, and as many searches
