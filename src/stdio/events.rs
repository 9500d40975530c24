//! Server-sent events, cut out of a byte stream as it arrives.

/// The `message` events of one stream.
#[derive(Debug)]
pub struct Events {
    limit: usize,
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    /// The event is named something else than `message`.
    is_other: bool,
    /// The last byte was a CR: an LF right after it belongs to the same line end.
    after_cr: bool,
    is_start: bool,
}

/// An event is longer than allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong;

impl Events {
    /// No bytes yet. An event may have `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Events {
            limit,
            line: Vec::new(),
            data: Vec::new(),
            has_data: false,
            is_other: false,
            after_cr: false,
            is_start: true,
        }
    }

    /// The data of the events that end within `chunk`. The `data` fields of one event are joined by line ends.
    ///
    /// # Errors
    /// [`TooLong`]; the stream is then of no use any more.
    pub fn push(&mut self, chunk: &[u8]) -> Result<Vec<Vec<u8>>, TooLong> {
        let mut events = Vec::new();
        let mut rest = chunk;
        while !rest.is_empty() {
            if std::mem::take(&mut self.after_cr) && rest[0] == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let end = memchr::memchr2(b'\n', b'\r', rest);
            self.line.extend_from_slice(&rest[..end.unwrap_or(rest.len())]);
            if self.line.len() + self.data.len() > self.limit {
                return Err(TooLong);
            }
            let Some(end) = end else { break };
            self.after_cr = rest[end] == b'\r';
            rest = &rest[end + 1..];
            events.extend(self.end_line());
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<Vec<u8>> {
        let line = std::mem::take(&mut self.line);
        let is_start = std::mem::take(&mut self.is_start);
        let line = line.strip_prefix(b"\xef\xbb\xbf").filter(|_| is_start).unwrap_or(&line);
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            let is_message = std::mem::take(&mut self.has_data) && !std::mem::take(&mut self.is_other);
            self.is_other = false;
            return is_message.then_some(data);
        }
        let colon = memchr::memchr(b':', line).unwrap_or(line.len());
        let value = line.get(colon + 1..).unwrap_or_default();
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match &line[..colon] {
            b"data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
            }
            b"event" => self.is_other = !matches!(value, b"" | b"message"),
            // Comments keep the connection alive; streams are not resumed.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(events: Result<Vec<Vec<u8>>, TooLong>) -> Vec<String> {
        events.unwrap().into_iter().map(|data| String::from_utf8(data).unwrap()).collect()
    }

    #[test]
    fn every_line_end_and_every_cut_gives_the_same_events() {
        for end in ["\n", "\r\n", "\r"] {
            let stream = "\u{feff}: hi||event: message|data: {\"a\":|data:1}|id: 7||data||event: ping|data: x||data: é||data: cut";
            let stream = stream.replace('|', end);
            let expected = ["{\"a\":\n1}", "", "é"];
            assert_eq!(texts(Events::new(100).push(stream.as_bytes())), expected, "{end:?}");
            let mut events = Events::new(100);
            let bytewise: Vec<_> = stream.bytes().flat_map(|byte| texts(events.push(&[byte]))).collect();
            assert_eq!(bytewise, expected, "{end:?}");
        }
    }

    #[test]
    fn an_event_over_the_limit_ends_the_stream() {
        assert_eq!(texts(Events::new(10).push(b"data: 1234\n\ndata: 5678\n\n")), ["1234", "5678"]);
        assert_eq!(Events::new(10).push(b"data: 12345"), Err(TooLong));
        assert_eq!(Events::new(10).push(b"data: 1\ndata: 2\ndata: 3\ndata: 4\n"), Err(TooLong));
    }
}
