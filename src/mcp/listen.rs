//! Telling clients that the list of tools has changed.
//!
//! A set of tools has [`Listeners`]; each client that listens holds a [`Listener`], one of the places of which there
//! is a bounded number, and gets a [`ListenStream`]: in 2026-07-28 the answer to `subscriptions/listen`, before the
//! stream that a client may GET. A stream ends when the tools are gone or the process stops: a client that listens
//! keeps neither alive. A client that reads slowly misses nothing that matters, for changes that it has not heard of
//! become one.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::SERVER_INFO_KEY;
use super::result::as_text;
use super::stream::{KEEP_ALIVE, event};

/// Names the subscription in all that is sent because of it: the id of the request that opened it.
const SUBSCRIPTION_ID_KEY: &str = "io.modelcontextprotocol/subscriptionId";

/// Those who listen to one set of tools.
#[derive(Debug)]
pub struct Listeners {
    /// Whether there is nothing to listen to any more. While it stays false, each sending of it means a change.
    ended: watch::Sender<bool>,
    places: Arc<Semaphore>,
    limit: usize,
}

/// There are as many listeners as allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{limit} clients listen to this session already, as many as allowed; retry later.")]
pub struct TooMany {
    /// The limit.
    pub limit: usize,
}

impl Listeners {
    /// Nobody listens yet; at most `limit` may.
    pub fn new(limit: usize) -> Self {
        Listeners { ended: watch::Sender::new(false), places: Arc::new(Semaphore::new(limit)), limit }
    }

    /// Lets one more listen.
    ///
    /// # Errors
    /// [`TooMany`] if all places are taken.
    pub fn join(&self) -> Result<Listener, TooMany> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| TooMany { limit: self.limit })?;
        let mut ended = self.ended.subscribe();
        if *ended.borrow() {
            // Who comes too late is told so at once.
            ended.mark_changed();
        }
        Ok(Listener { ended, _place: place })
    }

    /// The list of tools has changed.
    pub fn tell_change(&self) {
        self.ended.send_modify(|_| {});
    }

    /// There will be nothing to hear any more.
    pub fn end(&self) {
        self.ended.send_modify(|ended| *ended = true);
    }
}

/// A client's ear. Dropping it frees its place.
#[derive(Debug)]
pub struct Listener {
    ended: watch::Receiver<bool>,
    _place: OwnedSemaphorePermit,
}

/// What a listener hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The list of tools has changed, once or more often.
    Changed,
    /// Nothing will follow.
    Ended,
    /// Nothing has happened until the given time.
    Quiet,
}

impl Listener {
    /// The next thing that happens, at the latest at `until`.
    pub async fn next(&mut self, until: Instant) -> News {
        match tokio::time::timeout_at(until.into(), self.ended.changed()).await {
            Err(_) => News::Quiet,
            Ok(Ok(())) if !*self.ended.borrow_and_update() => News::Changed,
            // The other error: the tools have gone without a word.
            Ok(_) => News::Ended,
        }
    }
}

/// What one client is told for as long as it listens.
#[derive(Debug)]
pub struct ListenStream {
    listener: Listener,
    keep_alive: Duration,
    /// Sent at once.
    first: Bytes,
    /// Sent at each change, if the client wants to hear of it.
    changed: Option<Bytes>,
    /// Sent at the end.
    last: Option<Bytes>,
}

enum State {
    Start(ListenStream),
    Listening(ListenStream),
    Ended,
}

impl ListenStream {
    /// The answer to the `subscriptions/listen` with this id (2026-07-28, "Subscriptions"). Everything on it carries
    /// the id; what is acknowledged is what the client asked for and can have.
    pub fn subscription(
        listener: Listener,
        id: &str,
        wants_changes: bool,
        server_info: &Bytes,
        keep_alive: Duration,
    ) -> Self {
        let server_info = as_text(server_info);
        let tag = format!(r#""{SUBSCRIPTION_ID_KEY}":{id}"#);
        let accepted = if wants_changes { r#"{"toolsListChanged":true}"# } else { "{}" };
        let acknowledged = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"_meta":{{{tag}}},"notifications":{accepted}}}}}"#
        );
        let changed = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":{{"_meta":{{{tag}}}}}}}"#
        );
        let result = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"result":{{"resultType":"complete","_meta":{{{tag},"{SERVER_INFO_KEY}":{server_info}}}}}}}"#
        );
        ListenStream {
            listener,
            keep_alive,
            first: event(acknowledged.as_bytes()).into(),
            changed: wants_changes.then(|| event(changed.as_bytes()).into()),
            last: Some(event(result.as_bytes()).into()),
        }
    }

    /// The stream that a client up to 2025-11-25 GETs.
    pub fn legacy(listener: Listener, keep_alive: Duration) -> Self {
        let changed = br#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;
        ListenStream {
            listener,
            keep_alive,
            // The client sees the headers at once, though there is nothing to say.
            first: Bytes::from_static(KEEP_ALIVE),
            changed: Some(event(changed).into()),
            last: None,
        }
    }

    /// The bytes of the stream.
    pub fn into_bytes(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        unfold(State::Start(self), |state| async {
            let (chunk, state) = match state {
                State::Start(stream) => (stream.first.clone(), State::Listening(stream)),
                State::Listening(mut stream) => match stream.next().await {
                    Some(chunk) => (chunk, State::Listening(stream)),
                    None => (stream.last?, State::Ended),
                },
                State::Ended => return None,
            };
            Some((Ok(chunk), state))
        })
    }

    /// What is sent next; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        let until = Instant::now() + self.keep_alive;
        loop {
            match self.listener.next(until).await {
                News::Quiet => return Some(Bytes::from_static(KEEP_ALIVE)),
                News::Changed if self.changed.is_some() => return self.changed.clone(),
                // Not for this client; its next comment is due when it was.
                News::Changed => {}
                News::Ended => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt;

    const SOON: Duration = Duration::from_secs(5);

    fn now() -> Instant {
        Instant::now()
    }

    #[tokio::test]
    async fn a_listener_hears_of_changes_and_of_the_end() {
        let listeners = Listeners::new(2);
        listeners.tell_change();
        let mut listener = listeners.join().unwrap();
        assert_eq!(listener.next(now()).await, News::Quiet, "what was before is no news");
        listeners.tell_change();
        listeners.tell_change();
        assert_eq!(listener.next(now() + SOON).await, News::Changed);
        assert_eq!(listener.next(now()).await, News::Quiet, "two changes are one");
        listeners.tell_change();
        listeners.end();
        assert_eq!(listener.next(now() + SOON).await, News::Ended);
        let mut late = listeners.join().unwrap();
        assert_eq!(late.next(now() + SOON).await, News::Ended);
    }

    #[tokio::test]
    async fn listeners_that_are_forgotten_have_ended() {
        let listeners = Listeners::new(1);
        let mut listener = listeners.join().unwrap();
        drop(listeners);
        assert_eq!(listener.next(now() + SOON).await, News::Ended);
    }

    #[test]
    fn as_many_listen_as_allowed_and_a_dropped_one_makes_room() {
        let listeners = Listeners::new(2);
        let first = listeners.join().unwrap();
        let _second = listeners.join().unwrap();
        assert_eq!(listeners.join().unwrap_err(), TooMany { limit: 2 });
        drop(first);
        let _third = listeners.join().unwrap();
        assert!(listeners.join().is_err());
    }

    async fn bytes(stream: ListenStream) -> String {
        let chunks: Vec<_> = stream.into_bytes().map(|chunk| chunk.unwrap_or_default()).collect().await;
        String::from_utf8(chunks.concat()).unwrap()
    }

    #[tokio::test]
    async fn a_subscription_is_acknowledged_first_and_answered_last() {
        let listeners = Listeners::new(1);
        let stream = ListenStream::subscription(
            listeners.join().unwrap(),
            r#""a/1""#,
            true,
            &Bytes::from_static(br#"{"name":"s"}"#),
            SOON,
        );
        listeners.end();
        let expected = concat!(
            "event: message\n",
            r#"data: {"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":"a/1"},"notifications":{"toolsListChanged":true}}}"#,
            "\n\nevent: message\n",
            r#"data: {"jsonrpc":"2.0","id":"a/1","result":{"resultType":"complete","_meta":{"io.modelcontextprotocol/subscriptionId":"a/1","io.modelcontextprotocol/serverInfo":{"name":"s"}}}}"#,
            "\n\n",
        );
        assert_eq!(bytes(stream).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_was_asked_for_is_told() {
        let changed = concat!(
            "event: message\n",
            r#"data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":7}}}"#,
            "\n\n"
        );
        for (wants_changes, expected) in [(true, changed.as_bytes()), (false, KEEP_ALIVE)] {
            let listeners = Listeners::new(1);
            let listener = listeners.join().unwrap();
            let stream = ListenStream::subscription(listener, "7", wants_changes, &Bytes::from_static(b"{}"), SOON);
            let mut stream = std::pin::pin!(stream.into_bytes());
            stream.next().await;
            for _ in 0..3 {
                listeners.tell_change();
                assert_eq!(stream.next().await, Some(Ok(Bytes::from_static(expected))));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_says_nothing_is_kept_alive() {
        let listeners = Listeners::new(1);
        let stream = ListenStream::legacy(listeners.join().unwrap(), SOON);
        let mut stream = std::pin::pin!(stream.into_bytes());
        for _ in 0..3 {
            assert_eq!(stream.next().await, Some(Ok(Bytes::from_static(KEEP_ALIVE))));
        }
        listeners.end();
        assert_eq!(stream.next().await, None);
    }
}
