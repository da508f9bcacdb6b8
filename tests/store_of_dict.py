"""A store that is a dict, on a virtual clock: what meetings ask of it is counted for each rank."""

import attrs

from hypercomm.process_groups.agreement import meeting


@attrs.define
class Asked:
    """What one rank has asked: how often, about how many keys, and characters both ways."""

    questions: int = 0
    checked: int = 0
    sent: int = 0
    received: int = 0


@attrs.define
class Store:
    """What all have written, and a clock: an answer takes a millisecond."""

    held: dict = attrs.field(factory=dict)
    now_s: float = 0.0
    answer_s: float = 0.001

    def perform(self, asked, operation):
        """Return the answer, and when it comes."""
        match operation:
            case meeting.Now():
                return self.now_s, self.now_s
            case meeting.Sleep(seconds):
                return None, self.now_s + seconds
        keys, texts, answer, questions = self.answer(operation)
        asked.questions += questions
        asked.checked += len(keys) if isinstance(operation, meeting.Check) else 0
        asked.sent += sum(map(len, [*keys, *texts]))
        asked.received += len(answer) if isinstance(answer, str) else 0
        return answer, self.now_s + self.answer_s

    def answer(self, operation):
        """Do it; return the keys, the texts that are sent with them, the answer, and how often."""
        match operation:
            case meeting.Exchange(key, expected, text):
                if self.held.get(key, "") == expected:
                    self.held[key] = text
                return [key], [expected, text], self.held[key], 1
            case meeting.Read(key):
                return [key], [], self.held.get(key), 1
            case meeting.Check(keys):
                return keys, [], all(key in self.held for key in keys), 1
            case meeting.Publish(texts):
                self.held.update(texts)
                return texts.keys(), texts.values(), None, 1
            case meeting.Delete(keys):
                for key in keys:
                    self.held.pop(key, None)
                return keys, [], None, len(keys)

    def hold(self, asking, asked=None):
        """Hold a meeting alone, and return what comes of it."""
        answer, asked = None, asked or Asked()
        while True:
            try:
                operation = asking.send(answer)
            except StopIteration as stop:
                return stop.value
            answer, self.now_s = self.perform(asked, operation)
