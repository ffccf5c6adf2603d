class Emitter:
    def __init__(self):
        self._handlers = {}

    def on(self, event, handler):
        return self._add(event, handler, False)

    def once(self, event, handler):
        return self._add(event, handler, True)

    def _add(self, event, handler, once):
        entry = (handler, once)
        self._handlers.setdefault(event, []).append(entry)

        def remove():
            if entry in self._handlers[event]:
                self._handlers[event].remove(entry)

        return remove

    def off(self, event, handler):
        self._handlers[event] = [e for e in self._handlers.get(event, []) if e[0] != handler]

    def emit(self, event, *args):
        problem, entries = None, list(self._handlers.get(event, []))
        for entry in entries:
            if entry[1]:
                self._handlers[event].remove(entry)
            try:
                entry[0](*args)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return len(entries)
