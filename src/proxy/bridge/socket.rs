//! The WebSocket of a bridge: one task owns it and does all reading, writing, pinging and closing.
//!
//! A refused socket is closed *after* the upgrade, so that the app sees the code: before it, all that reaches a
//! WebSocket client is a failed handshake. The codec is `tokio-websockets`: beside axum's it keeps 8 kB for an
//! idle socket instead of 140 kB, and gives the memory of a large message back.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{Sink, Stream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_websockets::{CloseCode, Config as CodecConfig, Limits, Message, ServerBuilder, WebSocketStream};

use crate::auth::TokenHash;
use crate::protocol::{self, Close};
use crate::proxy::bridge::{Attempt, Bridge, Grace, Next, Received};
use crate::proxy::connection::{Alarm, ClientStream};
use crate::proxy::memory::Share;
use crate::proxy::metrics::BridgeEnd;

/// How long a closing handshake may take before the socket is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a newcomer asks again when sockets keep coming and going under it.
const ATTACH_ROUNDS: usize = 8;
/// What a socket sent before it broke may still arrive this long.
const LAST_WORDS: Duration = Duration::from_millis(250);
/// How many bytes of messages are read before other tasks get their turn. Each message counts as some.
const READ_BUDGET: usize = 256 * 1024;
/// What a message costs beside its bytes.
const MESSAGE_COST: usize = 8 * 1024;
/// How often is looked for room for a message.
const ROOM_INTERVAL: Duration = Duration::from_millis(50);
/// The largest message of a client that may not have a bridge, or is closing one.
const REFUSED_MESSAGE_BYTES: usize = 1024;
/// How many pongs may wait for a peer that sends pings and does not read.
const MAX_UNSENT_PONGS: usize = 64;
/// Messages are not split into frames: apps' libraries handle whole ones best.
const FRAME_SIZE: usize = usize::MAX;

/// How a bridge's socket behaves.
#[derive(Debug, Clone, Copy)]
pub struct SocketSettings {
    /// How often the app is pinged; two silent intervals close the socket.
    pub ping: Duration,
    /// How long a connected socket may take to show that it is alive when a second one comes.
    pub probe: Duration,
    /// The largest message from an app.
    pub max_message_bytes: usize,
    /// The most bad frames a minute.
    pub max_bad_frames: u32,
    /// How long a message may take from its first byte to its last.
    pub message_timeout: Duration,
    /// How long a message may wait for room in memory.
    pub write_stall: Duration,
}

/// Runs the WebSocket protocol over an upgraded connection.
pub fn server_socket<S: AsyncRead + AsyncWrite + Unpin>(stream: S, max_message_bytes: usize) -> WebSocketStream<S> {
    ServerBuilder::new()
        .config(CodecConfig::default().frame_size(FRAME_SIZE))
        .limits(Limits::default().max_payload_len(Some(max_message_bytes)))
        .serve(stream)
}

/// Tells a client why it may not have a bridge, or not any longer.
pub async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(mut socket: WebSocketStream<S>, close: Close) {
    let code = CloseCode::try_from(close.code()).unwrap_or(CloseCode::NORMAL_CLOSURE);
    // A socket that takes no frame is gone, which the goodbye finds out.
    let _gone = Pin::new(&mut socket).start_send(Message::close(Some(code), &close.reason()));
    say_goodbye(socket).await;
}

/// Sends what is still to be sent, the codec's own close frames (1002, 1007, 1009) among it, waits for the peer's
/// close frame and throws away what it says before.
async fn say_goodbye<S: AsyncRead + AsyncWrite + Unpin>(mut socket: WebSocketStream<S>) {
    *socket.limits_mut() = Limits::default().max_payload_len(Some(REFUSED_MESSAGE_BYTES));
    // Whoever does not take part is dropped.
    let _ended = tokio::time::timeout(CLOSE_TIMEOUT, poll_fn(|cx| Pin::new(&mut socket).poll_close(cx))).await;
}

/// What waits for the end of the graces, without a socket.
#[derive(Debug, Clone)]
pub struct Graces {
    /// Where it runs.
    pub tasks: TaskTracker,
    /// Says that the process ends.
    pub stop: CancellationToken,
}

impl Graces {
    /// The task is a small one of its own: the socket, its memory and its place among the connections are given back
    /// at once, however often an app comes and goes.
    fn begin(&self, bridge: &Arc<Bridge>, grace: Grace) {
        let (bridge, stop) = (Arc::clone(bridge), self.stop.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep_until(grace.until.into()) => bridge.end_grace(grace.epoch, Instant::now()),
                _ = grace.settled => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

/// A socket that asks for its session's bridge, before its upgrade is over: whoever reads the 101 may be called.
pub fn begin(bridge: &Arc<Bridge>, token: Option<TokenHash>, graces: &Graces) -> Newcomer {
    let bridge = Arc::clone(bridge);
    match bridge.try_attach(token, Instant::now()) {
        Attempt::Attached(epoch) => Newcomer::Attached(Attachment { bridge, epoch, graces: graces.clone() }),
        Attempt::Occupied { .. } | Attempt::Ended(_) => Newcomer::Waiting(bridge, token, graces.clone()),
    }
}

/// A socket on its way to its session.
#[derive(Debug)]
pub enum Newcomer {
    /// It is the bridge already.
    Attached(Attachment),
    /// Another one is, as things are.
    Waiting(Arc<Bridge>, Option<TokenHash>, Graces),
}

/// Connects a socket to its session and serves it until either goes.
///
/// `room` is what its messages have of the memory. `update_tools` is called for frames of that kind; its error is sent to the app. `tell` hears when the socket became
/// the bridge, and that it is that no longer.
pub async fn run<S: AsyncRead + AsyncWrite + Unpin>(
    mut socket: WebSocketStream<ClientStream<S>>,
    newcomer: Newcomer,
    settings: SocketSettings,
    room: Share,
    update_tools: impl Fn(&str) -> Result<usize, String>,
    tell: impl Fn(Life),
) {
    let attachment = match newcomer {
        Newcomer::Attached(attachment) => attachment,
        Newcomer::Waiting(bridge, token, graces) => match attach(bridge, token, graces, settings.probe).await {
            Ok(attachment) => attachment,
            Err(close) => {
                tell(Life::Refused(close));
                return refuse(socket, close).await;
            }
        },
    };
    let (epoch, since) = (attachment.epoch, Instant::now());
    tracing::info!(session.id = %attachment.bridge.session_id().short(), bridge.epoch = epoch, "bridge connected");
    tell(Life::Attached { epoch });
    let end = Pump::new(&mut socket, &attachment, settings, room, update_tools).run().await;
    tracing::info!(session.id = %attachment.bridge.session_id().short(), bridge.epoch = epoch, end = ?end, "bridge disconnected");
    let why = match &end {
        End::Gone => BridgeEnd::Gone,
        End::Close(close) => (*close).into(),
    };
    tell(Life::Detached { epoch, end: why, since });
    // From here on the app has no bridge, however long it takes to say goodbye.
    drop(attachment);
    match end {
        End::Close(close) => refuse(socket, close).await,
        End::Gone => say_goodbye(socket).await,
    }
}

/// A socket's hold on its session; the bridge is detached when this drops.
#[derive(Debug)]
pub struct Attachment {
    bridge: Arc<Bridge>,
    epoch: u64,
    graces: Graces,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if let Some(grace) = self.bridge.detach(self.epoch, Instant::now()) {
            self.graces.begin(&self.bridge, grace);
        }
    }
}

/// Makes a socket the session's bridge. Another one that is connected keeps its place if it shows that it is
/// alive, and loses it if it stays silent: no call is lost silently, and no two apps fight in a loop.
///
/// It must show it twice. An app that dials anew can be here before the last words of its own old socket are, and
/// must not be turned away because of them: it would think that there is another app, and stop.
async fn attach(
    bridge: Arc<Bridge>,
    token: Option<TokenHash>,
    graces: Graces,
    probe: Duration,
) -> Result<Attachment, Close> {
    let mut seen_alive = None;
    for _ in 0..ATTACH_ROUNDS {
        match bridge.try_attach(token, Instant::now()) {
            Attempt::Attached(epoch) => return Ok(Attachment { bridge, epoch, graces }),
            Attempt::Ended(close) => return Err(close),
            Attempt::Occupied { epoch, sign_of_life } => match tokio::time::timeout(probe, sign_of_life).await {
                Ok(Ok(())) if seen_alive == Some(epoch) => return Err(Close::AlreadyConnected),
                Ok(Ok(())) => {
                    seen_alive = Some(epoch);
                    tokio::time::sleep(LAST_WORDS).await;
                }
                // It went by itself.
                Ok(Err(_)) => {}
                Err(_) => {
                    if let Some(grace) = bridge.detach(epoch, Instant::now()) {
                        graces.begin(&bridge, grace);
                    }
                }
            },
        }
    }
    Err(Close::AlreadyConnected)
}

/// What becomes of a socket.
#[derive(Debug, Clone, Copy)]
pub enum Life {
    /// It is none, because the session has another one or has ended.
    Refused(Close),
    /// It is its session's bridge.
    Attached {
        /// Its epoch.
        epoch: u64,
    },
    /// It is that no longer.
    Detached {
        /// Its epoch.
        epoch: u64,
        /// Why.
        end: BridgeEnd,
        /// Since when it was.
        since: Instant,
    },
}

/// How a socket's service ended.
#[derive(Debug)]
enum End {
    /// The peer closed, or the connection broke.
    Gone,
    /// We close.
    Close(Close),
}

/// The work of one socket: polls the queue, the writing, the reading and the clocks in one task.
struct Pump<'a, S, F> {
    socket: Pin<&'a mut WebSocketStream<ClientStream<S>>>,
    bridge: &'a Bridge,
    epoch: u64,
    settings: SocketSettings,
    update_tools: F,
    /// What the message that is arriving has of the memory.
    room: Share,
    /// How much had been read when the last message was complete.
    read_before: usize,
    /// Since when a message is arriving.
    arriving_since: Option<Instant>,
    /// Since when it waits for room.
    waiting_since: Option<Instant>,
    /// Fires when a ping is due, or when the app has been silent for too long.
    clock: Alarm,
    ping_at: Instant,
    /// Since when the session waits for a sign of life of this app's, because another socket wants its place.
    probed_at: Option<Instant>,
    unsent_pongs: usize,
    /// When the ping was sent that is not answered yet.
    pinged_at: Option<Instant>,
    bad_frames: u32,
    bad_frames_since: Instant,
}

impl<'a, S, F> Pump<'a, S, F>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Fn(&str) -> Result<usize, String>,
{
    fn new(
        socket: &'a mut WebSocketStream<ClientStream<S>>,
        attachment: &'a Attachment,
        settings: SocketSettings,
        room: Share,
        update_tools: F,
    ) -> Self {
        let now = Instant::now();
        let read_before = socket.get_ref().read_bytes();
        let ping_at = now + settings.ping;
        Pump {
            socket: Pin::new(socket),
            bridge: &attachment.bridge,
            epoch: attachment.epoch,
            settings,
            update_tools,
            room,
            read_before,
            arriving_since: None,
            waiting_since: None,
            clock: Alarm::new(ping_at),
            ping_at,
            probed_at: None,
            unsent_pongs: 0,
            pinged_at: None,
            bad_frames: 0,
            bad_frames_since: now,
        }
    }

    async fn run(mut self) -> End {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if let Poll::Ready(end) = self.poll_clock(cx) {
            return Poll::Ready(end);
        }
        let mut budget = READ_BUDGET;
        loop {
            // One look at the clock serves what is sent, and the one message that is read.
            let now = Instant::now();
            if let Poll::Ready(end) = self.poll_write(now, cx) {
                return Poll::Ready(end);
            }
            if self.waiting_since.is_some()
                && let Some(poll) = self.poll_room(cx)
            {
                return poll;
            }
            let message = match self.socket.as_mut().poll_next(cx) {
                Poll::Pending => {
                    self.report_bytes();
                    return self.make_room(cx);
                }
                Poll::Ready(Some(Ok(message))) => message,
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(session.id = %self.bridge.session_id().short(), %error, "bridge connection broke");
                    // Of pieces that are too much together, the codec says nothing to the app.
                    let is_too_large = matches!(error, tokio_websockets::Error::PayloadTooLong { .. });
                    return Poll::Ready(if is_too_large { End::Close(Close::TooLarge) } else { End::Gone });
                }
                Poll::Ready(None) => return Poll::Ready(End::Gone),
            };
            self.read_before = self.socket.get_ref().read_bytes();
            self.arriving_since = None;
            let cost = MESSAGE_COST + message.as_payload().len();
            if let Some(close) = self.receive(message, now) {
                return Poll::Ready(End::Close(close));
            }
            budget = match budget.checked_sub(cost) {
                Some(left) => left,
                None => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            };
        }
    }

    /// Counts what is there of a message that is still arriving. Without room for it, nothing more of it is read.
    fn make_room(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        let arrived = self.socket.get_ref().read_bytes().saturating_sub(self.read_before);
        if arrived == 0 {
            return Poll::Pending;
        }
        self.arriving_since.get_or_insert_with(Instant::now);
        match self.room.grow_to(arrived) {
            Ok(()) => Poll::Pending,
            Err(no_room) => {
                self.bridge.records().limit(no_room.limit());
                self.waiting_since = Some(Instant::now());
                self.poll_room(cx).unwrap_or(Poll::Pending)
            }
        }
    }

    /// Looks whether there is room now; `None` if there is, and the message may go on arriving.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Option<Poll<End>> {
        let arrived = self.socket.get_ref().read_bytes().saturating_sub(self.read_before);
        let since = self.waiting_since?;
        if self.room.grow_to(arrived).is_ok() {
            self.waiting_since = None;
            // It is read at once: what woke this task may have been another thing than the socket.
            return None;
        }
        if since.elapsed() >= self.settings.write_stall {
            return Some(Poll::Ready(End::Close(Close::NoRoom)));
        }
        let again = Instant::now() + ROOM_INTERVAL;
        if self.clock.deadline() > again {
            self.clock.set(again);
        }
        // The clock wakes this task when it fires.
        match self.poll_clock(cx) {
            Poll::Ready(end) => Some(Poll::Ready(end)),
            Poll::Pending => Some(Poll::Pending),
        }
    }

    /// An app in the middle of a long message can answer no probe; its bytes answer for it.
    fn report_bytes(&mut self) {
        if self.probed_at.is_some_and(|probed_at| self.socket.get_ref().last_read() > probed_at) {
            self.probed_at = None;
            self.bridge.sign_of_life(self.epoch, Instant::now());
        }
    }

    /// Pings the app when it is time, and gives it up when it has been silent for two intervals.
    fn poll_clock(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        loop {
            ready!(self.clock.poll(cx));
            let now = Instant::now();
            let silent_at = self.socket.get_ref().last_read() + 2 * self.settings.ping;
            if now >= silent_at {
                return Poll::Ready(End::Close(Close::Silent));
            }
            if self.arriving_since.is_some_and(|since| now - since >= self.settings.message_timeout) {
                return Poll::Ready(End::Close(Close::TooSlow));
            }
            if now >= self.ping_at {
                self.ping_at = now + self.settings.ping;
                self.pinged_at = Some(now);
                if self.send(Message::text(protocol::PING)).is_err() || self.send(Message::ping("")).is_err() {
                    return Poll::Ready(End::Gone);
                }
            }
            // What comes meanwhile only makes it fire too early.
            self.clock.set(self.ping_at.min(silent_at));
        }
    }

    /// Moves frames from the queue to the socket for as long as it takes them, then flushes once.
    fn poll_write(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<End> {
        let mut is_ready = true;
        loop {
            match self.socket.as_mut().poll_ready(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(End::Gone),
                Poll::Pending => {
                    is_ready = false;
                    break;
                }
            }
            let message = match self.bridge.next_frame(self.epoch, now, cx.waker()) {
                // The bytes come from a str and from escaped strings, so they are UTF-8.
                Next::Send(frame) => {
                    let metrics = &self.bridge.records().metrics;
                    metrics.frames_sent.count();
                    metrics.bytes_sent.add(frame.len() as u64);
                    Message::text(Bytes::from(frame))
                }
                Next::Probe => {
                    // Not the time from above: what was read since then is older than the question.
                    self.probed_at = Some(Instant::now());
                    Message::ping("")
                }
                Next::Close(close) => return Poll::Ready(End::Close(close)),
                Next::Idle => break,
            };
            if self.send(message).is_err() {
                return Poll::Ready(End::Gone);
            }
        }
        if is_ready {
            match self.socket.as_mut().poll_flush(cx) {
                Poll::Ready(Ok(())) => {
                    self.unsent_pongs = 0;
                    return Poll::Pending;
                }
                Poll::Ready(Err(_)) => return Poll::Ready(End::Gone),
                Poll::Pending => {}
            }
        }
        // The socket takes no more for now. How long it may do so is its stream's affair.
        match self.bridge.next_close(self.epoch, cx.waker()) {
            Next::Close(close) => Poll::Ready(End::Close(close)),
            _ => Poll::Pending,
        }
    }

    fn send(&mut self, message: Message) -> Result<(), tokio_websockets::Error> {
        self.socket.as_mut().start_send(message)
    }

    fn receive(&mut self, message: Message, now: Instant) -> Option<Close> {
        let metrics = &self.bridge.records().metrics;
        let received = if let Some(text) = message.as_text() {
            metrics.frames_received.count();
            metrics.bytes_received.add(text.len() as u64);
            let payload: Bytes = message.clone().into_payload().into();
            let room = self.room.grow_to(text.len()).map(|()| self.room.split());
            // What it had while it arrived.
            self.room.release();
            match self.bridge.receive(self.epoch, &payload, text, room, now) {
                Received::UpdateTools(tools) => {
                    match (self.update_tools)(tools) {
                        Ok(count) => {
                            self.bridge.send(format!(r#"{{"type":"tools_updated","count":{count}}}"#).into_bytes())
                        }
                        Err(error) => self.bridge.send_error(&error),
                    }
                    return None;
                }
                Received::Done => return None,
                Received::Bad(error) => error,
            }
        } else if message.is_binary() {
            self.room.release();
            match self.bridge.receive_binary(self.epoch, now) {
                Received::Bad(error) => error,
                _ => return None,
            }
        } else {
            self.bridge.sign_of_life(self.epoch, now);
            if let Some(pinged_at) = self.pinged_at.take_if(|_| message.is_pong()) {
                self.bridge.measured_ping(self.epoch, now.duration_since(pinged_at));
            }
            // A pong to a peer that does not read stays in memory.
            self.unsent_pongs += usize::from(message.is_ping());
            return (self.unsent_pongs > MAX_UNSENT_PONGS).then_some(Close::Stalled);
        };
        tracing::warn!(session.id = %self.bridge.session_id().short(), error = %received, "bad frame from the app");
        self.bridge.send_error(&received);
        if now.duration_since(self.bad_frames_since) >= Duration::from_secs(60) {
            (self.bad_frames, self.bad_frames_since) = (0, now);
        }
        self.bad_frames += 1;
        (self.bad_frames > self.settings.max_bad_frames).then_some(Close::Policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::{Call, Event, Reply};
    use crate::protocol::{self, Features, SessionId, Spelling};
    use crate::proxy::bridge::{BridgeLimits, CallError, CallRequest};
    use crate::proxy::connection::{Busy, Clocks};
    use crate::proxy::records::Records;
    use crate::proxy::tenants::Count;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_flooding_app_gives_other_tasks_their_turn_after_a_few_messages() {
        const FRAMES: u64 = 1000;
        let limits = BridgeLimits {
            calls: 4,
            call_bytes: 1000,
            queue_bytes: 2000,
            result_bytes: 1000,
            progress_bytes: 100,
            json_depth: 9,
            resume_grace: Duration::ZERO,
        };
        let (session, records) = (SessionId::random(), Arc::new(Records::default()));
        let bridge =
            Bridge::new(session, Spelling::Snake, Features::default(), limits, Arc::clone(&records), Instant::now());
        let graces = Graces { tasks: TaskTracker::new(), stop: CancellationToken::new() };
        let Newcomer::Attached(attachment) = begin(&Arc::new(bridge), None, &graces) else {
            panic!("it is the first one")
        };
        // Results of no call, each of which is counted, all of them there before the first is read.
        let result = format!(r#"{{"type":"invoke_result","request_id":"{session}:9","ok":true}}"#);
        let mut frame = vec![0x81, 0x80 | u8::try_from(result.len()).unwrap(), 0, 0, 0, 0];
        frame.extend_from_slice(result.as_bytes());
        let (mut app, stream) = tokio::io::duplex(1 << 20);
        app.write_all(&frame.repeat(FRAMES as usize)).await.unwrap();
        let clocks =
            Clocks { head: Duration::from_secs(9), idle: Duration::from_secs(9), write_stall: Duration::from_secs(9) };
        let stream = ClientStream::new(stream, Busy::default(), clocks).upgraded(Bytes::new());
        let mut socket = server_socket(stream, 1000);
        let settings = SocketSettings {
            ping: Duration::from_secs(9),
            probe: Duration::from_secs(9),
            max_message_bytes: 1000,
            max_bad_frames: 9,
            message_timeout: Duration::from_secs(9),
            write_stall: Duration::from_secs(9),
        };
        let room = Share::new(None, &Arc::new(Count::new(usize::MAX)));
        let mut pump = Box::pin(Pump::new(&mut socket, &attachment, settings, room, |_| Ok(0)).run());
        let handled = || records.metrics.results_ignored.get();
        let (mut turns, mut most) = (0, 0);
        while handled() < FRAMES {
            let before = handled();
            // A turn that a task takes in a runtime; it is woken at once when there is more.
            tokio::task::yield_now().await;
            let turn = poll_fn(|cx| Poll::Ready(pump.as_mut().poll(cx))).await;
            assert!(turn.is_pending());
            (turns, most) = (turns + 1, most.max(handled() - before));
        }
        let per_turn = (READ_BUDGET / MESSAGE_COST + 1) as u64;
        assert!(most <= per_turn && turns >= FRAMES / per_turn, "{most} messages in one of {turns} turns");
    }

    #[tokio::test(start_paused = true)]
    async fn the_grace_of_a_socket_that_failed_before_it_was_served_ends_too() {
        let limits = BridgeLimits {
            calls: 4,
            call_bytes: 1000,
            queue_bytes: 2000,
            result_bytes: 1000,
            progress_bytes: 100,
            json_depth: 9,
            resume_grace: Duration::from_secs(15),
        };
        let features = Features { resume: true, ..Features::default() };
        let graces = Graces { tasks: TaskTracker::new(), stop: CancellationToken::new() };
        let now = || tokio::time::Instant::now().into_std();
        let bridge =
            Arc::new(Bridge::new(SessionId::random(), Spelling::Snake, features, limits, Arc::default(), now()));
        drop(begin(&bridge, None, &graces));
        let request = CallRequest {
            client_id: "1",
            tool: "t",
            arguments: "{}",
            kept_bytes: 2,
            progress: false,
            context: protocol::Context::default(),
            timeout: Duration::from_secs(120),
            cancel_on_drop: true,
        };
        let mut call = bridge.call(request, now()).unwrap();
        let Event::Ended(Reply::Failed(error)) = call.next(now() + Duration::from_secs(20)).await else {
            panic!("the call still waits for the app");
        };
        assert_eq!(error, CallError::NotDelivered.to_string());
    }
}
