class Emitter:
    def __init__(self):
        self._handlers = {}

    def on(self, event, handler):
        self._handlers.setdefault(event, []).append(handler)

    def off(self, event, handler):
        self._handlers[event].remove(handler)

    def emit(self, event, *args):
        for handler in self._handlers.get(event, []):
            handler(*args)
        return len(self._handlers.get(event, []))
