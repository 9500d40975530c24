//! Server-sent events: how an answer is held open while a call runs.
//!
//! A call that takes long would be cut by reverse proxies (nginx after 60 s) and by clients' socket timeouts, so
//! it is answered by a stream: comments keep it alive, progress is told as it comes, and the last event is always
//! the result, also when the call times out or the proxy stops. A stream that just ended would hang the client.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use http::StatusCode;

use super::result::Shape;
use super::{Call, Event, Progress};

/// A comment: clients ignore it, proxies see that the stream lives.
pub(super) const KEEP_ALIVE: &[u8] = b":\n\n";

/// The events of a call that is still running. Dropping it drops the call.
#[derive(Debug)]
pub struct CallStream<C> {
    call: C,
    shape: Shape,
    id: String,
    token: Option<String>,
    first: Option<Progress>,
    keep_alive: Duration,
}

enum State<C> {
    Start(CallStream<C>),
    Running(CallStream<C>),
    Ended,
}

impl<C: Call> CallStream<C> {
    /// The stream of `call`, to be answered to request `id`; `token` names it in progress notifications.
    pub fn new(
        call: C,
        shape: Shape,
        id: &str,
        token: Option<&str>,
        first: Option<Progress>,
        keep_alive: Duration,
    ) -> Self {
        CallStream { call, shape, id: id.to_owned(), token: token.map(str::to_owned), first, keep_alive }
    }

    /// The bytes of the stream.
    pub fn into_bytes(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        unfold(State::Start(self), |state| async {
            let (chunk, state): (Bytes, _) = match state {
                // Something is sent at once, so that the client sees the headers.
                State::Start(mut stream) => {
                    let chunk = match stream.first.take() {
                        Some(progress) => stream.progress(&progress),
                        None => KEEP_ALIVE.to_vec(),
                    };
                    (chunk.into(), State::Running(stream))
                }
                State::Running(mut stream) => match stream.call.next(Instant::now() + stream.keep_alive).await {
                    Event::Quiet => (Bytes::from_static(KEEP_ALIVE), State::Running(stream)),
                    Event::Progress(progress) => (stream.progress(&progress).into(), State::Running(stream)),
                    Event::Ended(reply) => {
                        // The status line has been sent: an error's own status is lost, its code is not.
                        let (_, body, told) = stream.shape.response(&stream.id, &reply);
                        stream.call.answered(told, StatusCode::OK);
                        (super::kept(event(&body), stream.call), State::Ended)
                    }
                },
                State::Ended => return None,
            };
            Some((Ok(chunk), state))
        })
    }

    fn progress(&self, progress: &Progress) -> Vec<u8> {
        let Some(token) = &self.token else { return KEEP_ALIVE.to_vec() };
        let mut body = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{}"#,
            progress.progress
        );
        for (name, value) in [("total", &progress.total), ("message", &progress.message)] {
            if let Some(value) = value {
                body.push_str(&format!(r#","{name}":{value}"#));
            }
        }
        body.push_str("}}");
        event(body.as_bytes())
    }
}

/// One `message` event. A line end in relayed JSON would end the event's data. It can only stand between two tokens,
/// where JSON has no use for it, so a space takes its place: the event is hardly longer than the JSON is.
pub fn event(json: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(json.len() + 32);
    out.extend_from_slice(b"event: message\ndata: ");
    out.extend(json.iter().map(|&byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }));
    out.extend_from_slice(b"\n\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_of_the_same_json_however_many_lines_that_had() {
        let json = format!("{{\r\n\"a\\n\":\r[{}1] }}", "\n".repeat(1000));
        let event = String::from_utf8(event(json.as_bytes())).unwrap();
        let data = event.strip_prefix("event: message\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
        assert!(!data.contains(['\n', '\r']));
        assert_eq!(data.len(), json.len());
        assert_eq!(data.replace(' ', ""), r#"{"a\n":[1]}"#);
    }
}
