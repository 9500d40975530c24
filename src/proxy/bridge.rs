//! The live half of a session: its calls in flight, and what waits to be sent to its app. No sockets here.
//!
//! [`Bridge`] is one small state machine behind a mutex that is never held across an await. Callers put calls in
//! ([`Bridge::call`]) and wait for the reply on their own; the task that owns the app's socket takes frames out
//! ([`Bridge::next_frame`]) and hands in what the app sends ([`Bridge::receive`]). Time is passed in.
//!
//! Every accepted socket gets its own epoch, so a late goodbye of a replaced one cannot evict its successor. A
//! call is known by our own number, never by the client's JSON-RPC id, for those collide. A call that is dropped
//! by its caller leaves at once: its slot is free, an app that wants to know is told, a late result is ignored.
//!
//! A call is executed at most once. When a socket goes, the calls that it carried end; those of an app that resumes
//! wait for a grace, are named in the `hello` of the next socket, and are sent again only if the app says that it
//! never saw them.

pub mod socket;
mod state;

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use state::{Attached, Calls, Ended, Outgoing, Parked, Pending, ProgressPipe, State};

use crate::auth::TokenHash;
use crate::cancel::{Tombstones, same_id};
use crate::mcp::{Event, Progress, Reply};
use crate::protocol::{
    self, Answer, BadFrame, CallRef, CancelReason, Close, Context, Features, FromApp, Invoke, SessionId, Spelling,
};
use crate::proxy::memory::{NoRoom, Share};
use crate::proxy::metrics::{CallEnd, Limit};
use crate::proxy::records::Records;

/// How many progress reports wait for a slow client; further ones are dropped, for only the last one matters.
const PROGRESS_QUEUE: usize = 16;
/// How long after its deadline a call may still stand in the books.
const OVERDUE: Duration = Duration::from_secs(5);

/// The bounds of one session's bridge.
#[derive(Debug, Clone, Copy)]
pub struct BridgeLimits {
    /// The most calls in flight.
    pub calls: usize,
    /// The most bytes that their requests take.
    pub call_bytes: usize,
    /// The most bytes that wait to be sent to the app.
    pub queue_bytes: usize,
    /// The most bytes of a result.
    pub result_bytes: usize,
    /// The most bytes of a progress report.
    pub progress_bytes: usize,
    /// The deepest nesting of a frame.
    pub json_depth: usize,
    /// How long the calls of an app that resumes wait for its return.
    pub resume_grace: Duration,
}

/// Why a call has no answer from its app. The texts are what the MCP client's model reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No app is there: the call was not sent.
    #[error("Bridge is not connected.")]
    NotConnected,
    /// The app's socket went while it had the call. It may have run; it is never sent twice.
    #[error("Bridge disconnected before the tool answered.")]
    Lost,
    /// The app, which resumes calls, had the call and did not come back in time.
    #[error("Bridge disconnected before the tool answered, and the app did not come back within {} s. The tool may have run.", .0.as_secs_f64())]
    NotResumed(Duration),
    /// The app, which resumes calls, did not come back in time to get the call.
    #[error("Bridge is not connected. The call was not delivered.")]
    NotDelivered,
    /// The call's time was over.
    #[error("Tool call timed out after {} s.", .0.as_secs_f64())]
    Timeout(Duration),
    /// The client cancelled the call.
    #[error("Tool call was cancelled.")]
    Cancelled,
    /// The session was deleted.
    #[error("Chat session was unregistered.")]
    Deleted,
    /// The proxy stops.
    #[error("The proxy is shutting down; retry in a few seconds.")]
    ShuttingDown,
    /// The session has too many calls in flight.
    #[error("Too many calls in flight for this session ({0}). Retry in 1 s.")]
    Busy(usize),
    /// The session's calls in flight take too much memory.
    #[error("The calls in flight for this session hold too much (limit: {0} bytes). Retry in 1 s.")]
    BusyBytes(usize),
    /// The app reads too slowly.
    #[error("Too much waits to be sent to this app (limit: {0} bytes). Retry in 1 s.")]
    QueueFull(usize),
    /// The result is larger than allowed.
    #[error("The tool's result takes {size} bytes; the limit is {limit}.")]
    TooLarge {
        /// Its size in bytes.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// There is no room in memory for the result.
    #[error("The tool ran, and its result is lost. {0}")]
    NoRoom(NoRoom),
    /// The app's answer cannot be used.
    #[error("The app's answer is not usable. {0}")]
    Malformed(String),
}

impl CallError {
    /// In a word, for what is counted and for the audit log.
    pub fn end(&self) -> CallEnd {
        match self {
            CallError::NotConnected => CallEnd::NotConnected,
            CallError::Lost => CallEnd::Lost,
            CallError::NotResumed(_) => CallEnd::NotResumed,
            CallError::NotDelivered => CallEnd::NotDelivered,
            CallError::Timeout(_) => CallEnd::Timeout,
            CallError::Cancelled => CallEnd::Cancelled,
            CallError::Deleted => CallEnd::SessionDeleted,
            CallError::ShuttingDown => CallEnd::ShuttingDown,
            CallError::Busy(_) | CallError::BusyBytes(_) => CallEnd::Busy,
            CallError::QueueFull(_) => CallEnd::QueueFull,
            CallError::TooLarge { .. } => CallEnd::ResultTooLarge,
            CallError::NoRoom(NoRoom::Tenant(_)) => CallEnd::TenantBusy,
            CallError::NoRoom(NoRoom::Everybody(_)) => CallEnd::ProxyBusy,
            CallError::Malformed(_) => CallEnd::Malformed,
        }
    }

    /// The bound that was met, if it was one.
    pub fn limit(&self) -> Option<Limit> {
        match self {
            CallError::Busy(_) => Some(Limit::CallsPerSession),
            CallError::BusyBytes(_) => Some(Limit::CallBytesPerSession),
            CallError::QueueFull(_) => Some(Limit::QueueBytes),
            CallError::TooLarge { .. } => Some(Limit::ResultBytes),
            _ => None,
        }
    }
}

/// How a call ended.
pub type Outcome = Result<Reply, CallError>;

/// A tools/call that is to be sent to the app.
#[derive(Debug, Clone, Copy)]
pub struct CallRequest<'a> {
    /// The client's JSON-RPC id: what its cancellation will name.
    pub client_id: &'a str,
    /// The tool's name.
    pub tool: &'a str,
    /// The arguments' text.
    pub arguments: &'a str,
    /// How many bytes of its request are kept for as long as it runs.
    pub kept_bytes: usize,
    /// Whether the client wants to hear of progress.
    pub progress: bool,
    /// The caller.
    pub context: Context<'a>,
    /// How long the call may take.
    pub timeout: Duration,
    /// Whether the app is to stop when the caller goes away.
    pub cancel_on_drop: bool,
}

/// The live half of a session.
#[derive(Debug)]
pub struct Bridge {
    session: SessionId,
    spelling: Spelling,
    features: Features,
    limits: BridgeLimits,
    records: Arc<Records>,
    state: Mutex<State>,
}

/// A socket that is a session's bridge.
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    /// Since when.
    pub since: Instant,
    /// How long its app took to answer the last ping.
    pub ping: Option<Duration>,
}

/// How long the calls of a socket that has gone wait for the next one. Whoever gets it ends it
/// ([`Bridge::end_grace`]).
#[derive(Debug)]
pub struct Grace {
    /// The socket that has gone.
    pub epoch: u64,
    /// When its calls end.
    pub until: Instant,
    /// Resolves when nothing waits any more: the next socket has come, or the session has ended.
    pub settled: oneshot::Receiver<()>,
}

/// Whether a socket may become the session's bridge.
#[derive(Debug)]
pub enum Attempt {
    /// It is; this is its epoch.
    Attached(u64),
    /// Another one is connected. The receiver resolves at that one's next sign of life.
    Occupied {
        /// The other one's epoch.
        epoch: u64,
        /// Resolves to `Ok` if it is alive, to `Err` if it goes.
        sign_of_life: oneshot::Receiver<()>,
    },
    /// The session has ended; how to close the socket.
    Ended(Close),
}

/// What the socket task is to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Send this text frame.
    Send(Vec<u8>),
    /// Ask the app whether it is alive.
    Probe,
    /// Close the socket.
    Close(Close),
    /// Wait to be woken.
    Idle,
}

/// What the socket task is to do about a frame that came in.
#[derive(Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// Nothing more.
    Done,
    /// The frame was not valid; the sentence says why.
    Bad(String),
    /// The app changes its tools; the text of the array.
    UpdateTools(&'a str),
}

impl Bridge {
    /// A bridge to which no app is connected yet.
    pub fn new(
        session: SessionId,
        spelling: Spelling,
        features: Features,
        limits: BridgeLimits,
        records: Arc<Records>,
        now: Instant,
    ) -> Self {
        Bridge {
            session,
            spelling,
            features,
            limits,
            records,
            state: Mutex::new(State {
                epoch: 0,
                attached: None,
                parked: None,
                is_final: false,
                number: 0,
                calls: Calls::default(),
                outbox: VecDeque::new(),
                outbox_bytes: 0,
                last_sign: now,
                tombstones: Tombstones::default(),
                ended: None,
            }),
        }
    }

    /// The same for a session of an earlier process. Sockets and calls are counted on from where that one cannot have
    /// been, so that nobody takes a new call for an old one.
    pub fn restored(self) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        {
            let mut state = self.state();
            state.epoch = since.as_secs();
            // Small enough for a double, as JavaScript has it.
            state.number = u64::try_from(since.as_micros()).unwrap_or_default();
        }
        self
    }

    /// The session.
    pub fn session_id(&self) -> SessionId {
        self.session
    }

    /// What the app opted in to.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Where it tells what happens.
    pub fn records(&self) -> &Records {
        &self.records
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic inside leaves at worst one call unanswered, which its deadline ends.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- For MCP clients ----

    /// Sends a call to the app.
    ///
    /// # Errors
    /// [`CallError`] if it cannot be sent now; nothing was sent then.
    pub fn call(self: &Arc<Self>, request: CallRequest<'_>, now: Instant) -> Result<Call, CallError> {
        let number = self.state().admit(self, &request, now)?;
        let invoke = Invoke {
            session: self.session,
            number,
            tool: request.tool,
            arguments: request.arguments,
            progress: request.progress && self.features.progress,
            context: self.features.context.then_some(request.context),
        };
        // Copying the arguments may take a while, so it is done without the lock.
        let frame = invoke.write(self.spelling);
        let (reply, receiver) = oneshot::channel();
        let (progress, reports) = if invoke.progress {
            let (sender, receiver) = mpsc::channel(PROGRESS_QUEUE);
            (Some(ProgressPipe { reports: sender, last: f64::NEG_INFINITY }), Some(receiver))
        } else {
            (None, None)
        };
        let deadline = now + request.timeout;
        let timeout = request.timeout;
        let pending = Pending {
            client_id: request.client_id.into(),
            kept_bytes: request.kept_bytes,
            reply,
            progress,
            deadline,
            timeout,
            sent: None,
            sent_at: now,
            frame: None,
        };
        {
            let mut state = self.state();
            state.admission(self, &request, now)?;
            // A cancellation may have come while the frame was written.
            if state.tombstones.take(request.client_id, now) {
                return Err(CallError::Cancelled);
            }
            if state.outbox_bytes + frame.len() > self.limits.queue_bytes {
                return Err(CallError::QueueFull(self.limits.queue_bytes));
            }
            state.calls.insert(number, pending);
            state.push(Outgoing::Invoke(number, frame));
        }
        Ok(Call {
            bridge: Arc::clone(self),
            number,
            reply: receiver,
            room: None,
            reports,
            deadline,
            timeout,
            cancel_on_drop: request.cancel_on_drop,
            ended: false,
            end: None,
        })
    }

    /// A client cancelled the request with this JSON-RPC id. Two requests in flight with the same id: neither is
    /// meant; none: the cancellation waits for it a short while.
    pub fn cancel(&self, client_id: &str, now: Instant) {
        let mut state = self.state();
        let mut matches = state.calls.iter().filter(|(_, call)| same_id(&call.client_id, client_id)).map(|(n, _)| *n);
        match (matches.next(), matches.next()) {
            (Some(number), None) => {
                drop(matches);
                if let Some(call) = state.abandon(self, number, CancelReason::Cancelled, true, now) {
                    call.finish(CallError::Cancelled);
                }
            }
            (None, None) => {
                drop(matches);
                state.tombstones.bury(client_id, now);
            }
            (_, Some(_)) => {}
        }
    }

    // ---- For the registry ----

    /// Whether the session's life is over: no app connected, no call in flight, no sign of the app for `ttl`.
    /// If so, it ends here and now, so that nothing can attach in between.
    pub fn expire(&self, ttl: Duration, now: Instant) -> bool {
        let mut state = self.state();
        let alive = state.attached.is_some() || !state.calls.is_empty() || now.duration_since(state.last_sign) < ttl;
        if !alive {
            state.ended = Some((CallError::Deleted, Close::UnknownSession));
            state.parked = None;
        }
        !alive
    }

    /// Waits for no app to come back any more: the process stops, and no new socket can be accepted.
    pub fn end_waiting(&self, now: Instant) {
        let mut state = self.state();
        state.is_final = true;
        if state.parked.take().is_some() {
            let grace = self.limits.resume_grace;
            state.fail_all(&CallError::NotResumed(grace), &CallError::NotDelivered, now);
        }
    }

    /// Ends the calls whose time has been over for five seconds. A caller ends its call itself, unless its client
    /// takes nothing, so that the caller never gets to run. And forgets cancellations that have waited long enough.
    pub fn sweep(&self, now: Instant) {
        let mut state = self.state();
        state.tombstones.sweep(now);
        let is_overdue = |call: &Pending| now.saturating_duration_since(call.deadline) > OVERDUE;
        let overdue: Vec<u64> = state.calls.iter().filter(|(_, call)| is_overdue(call)).map(|(n, _)| *n).collect();
        for number in overdue {
            if let Some(call) = state.abandon(self, number, CancelReason::Timeout, true, now) {
                let timeout = call.timeout;
                call.finish(CallError::Timeout(timeout));
            }
        }
    }

    /// When the session would end if nothing happened; `None` while it is kept alive.
    pub fn expires_at(&self, ttl: Duration) -> Option<Instant> {
        let state = self.state();
        (state.attached.is_none() && state.calls.is_empty()).then(|| state.last_sign + ttl)
    }

    /// The app did something over HTTP.
    pub fn touch(&self, now: Instant) {
        self.state().last_sign = now;
    }

    /// Ends the session: its calls fail with `error`, its socket is closed.
    pub fn end(&self, error: CallError, close: Close) {
        let mut state = self.state();
        let to_newcomers = if close == Close::Deleted { Close::UnknownSession } else { close };
        state.ended = Some((error.clone(), to_newcomers));
        state.parked = None;
        state.drop_unsent();
        while let Some((number, call)) = state.calls.pop_first() {
            if self.features.cancel && call.sent.is_some() {
                let reason =
                    if close == Close::Deleted { CancelReason::SessionDeleted } else { CancelReason::Cancelled };
                let frame = protocol::cancel_frame(self.session, number, reason, self.spelling);
                state.push(Outgoing::Other(frame));
            }
            call.finish(error.clone());
        }
        if let Some(attached) = &mut state.attached {
            attached.close = Some(close);
        }
        state.wake();
    }

    /// Closes the socket if the token that it came with opens the session no more; true if so. Its calls live on as
    /// after any socket that goes.
    pub fn cut_unless(&self, opens: impl FnOnce(Option<&TokenHash>) -> bool) -> bool {
        let mut state = self.state();
        let Some(attached) = state.attached.as_mut().filter(|attached| attached.close.is_none()) else { return false };
        if opens(attached.token.as_ref()) {
            return false;
        }
        (attached.close, attached.is_cut) = (Some(Close::Unauthorized), true);
        state.wake();
        true
    }

    /// The socket that is connected, if there is one, and the epoch of the newest.
    pub fn connection(&self) -> (Option<Connection>, u64) {
        let state = self.state();
        let connection =
            state.attached.as_ref().map(|attached| Connection { since: attached.since, ping: attached.ping });
        (connection, state.epoch)
    }

    /// How many calls are in flight.
    pub fn calls_in_flight(&self) -> usize {
        self.state().calls.len()
    }

    // ---- For the socket ----

    /// A socket that came with a token of this hash, or without one, asks to be the session's bridge.
    pub fn try_attach(&self, token: Option<TokenHash>, now: Instant) -> Attempt {
        let mut state = self.state();
        if let Some((_, close)) = state.ended {
            return Attempt::Ended(close);
        }
        if let Some(attached) = &mut state.attached {
            let (probe, sign_of_life) = oneshot::channel();
            attached.probes.push(probe);
            attached.probe_due = true;
            let epoch = attached.epoch;
            state.wake();
            return Attempt::Occupied { epoch, sign_of_life };
        }
        state.epoch += 1;
        state.last_sign = now;
        state.parked = None;
        let epoch = state.epoch;
        if self.features.resume {
            let pending = state.calls.iter().filter(|(_, call)| call.sent.is_some()).map(|(number, _)| *number);
            let grace = self.limits.resume_grace;
            let hello = protocol::hello_frame(self.session, epoch, instance(), grace, pending, self.spelling);
            // Calls that came in between wait behind it.
            state.outbox_bytes += hello.len();
            state.outbox.push_front(Outgoing::Other(hello));
        }
        state.attached = Some(Attached {
            epoch,
            since: now,
            ping: None,
            close: None,
            is_cut: false,
            token,
            probes: Vec::new(),
            probe_due: false,
            waker: None,
        });
        Attempt::Attached(epoch)
    }

    /// The socket of `epoch` is gone, or must make room. Its calls end, those that were not sent yet with another
    /// word; the calls of an app that resumes wait for the time that is returned.
    pub fn detach(&self, epoch: u64, now: Instant) -> Option<Grace> {
        let mut state = self.state();
        if state.attached.as_ref().is_none_or(|attached| attached.epoch != epoch) {
            return None;
        }
        state.wake();
        state.attached = None;
        state.last_sign = now;
        if self.features.resume && state.ended.is_none() && !state.is_final {
            // What was to be told to that socket is told by the next hello, or not needed any more.
            state.outbox.retain(|outgoing| matches!(outgoing, Outgoing::Invoke(..)));
            state.outbox_bytes = state.outbox.iter().map(Outgoing::len).sum();
            let until = now + self.limits.resume_grace;
            let (awaited, settled) = oneshot::channel();
            state.parked = Some(Parked { epoch, until, _awaited: awaited });
            return Some(Grace { epoch, until, settled });
        }
        state.fail_all(&CallError::Lost, &CallError::NotConnected, now);
        None
    }

    /// The grace after the socket of `epoch` is over. If no other has come, its calls end.
    pub fn end_grace(&self, epoch: u64, now: Instant) {
        let mut state = self.state();
        if state.parked.as_ref().is_some_and(|parked| parked.epoch == epoch) {
            state.parked = None;
            let grace = self.limits.resume_grace;
            state.fail_all(&CallError::NotResumed(grace), &CallError::NotDelivered, now);
        }
    }

    /// What the socket of `epoch` is to do next. When that is nothing, `waker` is woken by the next change.
    pub fn next_frame(&self, epoch: u64, now: Instant, waker: &Waker) -> Next {
        let mut state = self.state();
        let Some(attached) = state.attached.as_mut().filter(|attached| attached.epoch == epoch) else {
            return Next::Close(Close::Replaced);
        };
        if attached.is_cut
            && let Some(close) = attached.close
        {
            return Next::Close(close);
        }
        if std::mem::take(&mut attached.probe_due) {
            return Next::Probe;
        }
        while let Some(outgoing) = state.outbox.pop_front() {
            state.outbox_bytes -= outgoing.len();
            match outgoing {
                Outgoing::Other(frame) => return Next::Send(frame),
                Outgoing::Invoke(number, mut frame) => {
                    // A call whose time is over, or whose caller has gone, does not start.
                    let Some(call) = state.calls.get_mut(number).filter(|call| call.deadline > now) else { continue };
                    call.sent = Some(epoch);
                    call.sent_at = now;
                    if self.features.resume {
                        call.frame = Some(frame.clone());
                    }
                    let left = self.features.deadline.then(|| call.deadline.duration_since(now).as_millis());
                    protocol::finish_invoke(&mut frame, self.spelling, left);
                    return Next::Send(frame);
                }
            }
        }
        state.close_or_wait(epoch, waker)
    }

    /// The same while the socket takes no frames: is it to be closed?
    pub fn next_close(&self, epoch: u64, waker: &Waker) -> Next {
        self.state().close_or_wait(epoch, waker)
    }

    /// The app of the socket of `epoch` answered a ping.
    pub fn measured_ping(&self, epoch: u64, time: Duration) {
        self.records.metrics.ping_time.observe(time);
        if let Some(attached) = self.state().attached.as_mut().filter(|attached| attached.epoch == epoch) {
            attached.ping = Some(time);
        }
    }

    /// Any frame of the socket of `epoch` is a sign of life.
    pub fn sign_of_life(&self, epoch: u64, now: Instant) {
        self.state().sign_of_life(epoch, now);
    }

    /// Takes in a text frame of the socket of `epoch`. `text` must be the whole of `message`, and `room` is what it has
    /// of the memory.
    pub fn receive<'a>(
        &self,
        epoch: u64,
        message: &Bytes,
        text: &'a str,
        room: Result<Option<Share>, NoRoom>,
        now: Instant,
    ) -> Received<'a> {
        let frame = FromApp::parse(text, self.limits.json_depth);
        let mut state = self.state();
        if !state.sign_of_life(epoch, now) {
            return Received::Done;
        }
        match frame {
            Ok(FromApp::Pong) => Received::Done,
            Ok(FromApp::Result { call, answer: Answer::UnknownRequest }) if self.features.resume => {
                state.redeliver(self, &call, now);
                Received::Done
            }
            Ok(FromApp::Result { call, answer }) => {
                let (outcome, room) = match (self.outcome(answer, message), room) {
                    (Ok(_), Err(no_room)) => {
                        self.records.limit(no_room.limit());
                        (Err(CallError::NoRoom(no_room)), None)
                    }
                    (outcome, room) => (outcome, room.ok().flatten()),
                };
                state.resolve(self, &call, outcome, room, now);
                Received::Done
            }
            Ok(FromApp::Progress { progress, .. }) if progress.size() > self.limits.progress_bytes => {
                self.records.metrics.bad_frames.count();
                self.records.limit(Limit::ProgressBytes);
                let (size, limit) = (progress.size(), self.limits.progress_bytes);
                Received::Bad(format!("tool_progress: the report takes {size} bytes; the limit is {limit}."))
            }
            Ok(FromApp::Progress { call, progress }) => {
                let number = call.number_in(self.session);
                let call = number.and_then(|number| state.calls.get_mut(number));
                if let Some(call) = call.filter(|call| call.sent.is_some()) {
                    call.report(progress);
                }
                Received::Done
            }
            Ok(FromApp::UpdateTools { tools }) if self.features.tools => Received::UpdateTools(tools),
            Ok(FromApp::UpdateTools { .. }) => {
                Received::Bad("update_tools: the app did not register the bridge feature 'tools'.".into())
            }
            Err(BadFrame { message, call, is_unreadable }) => {
                self.records.metrics.bad_frames.count();
                let call = if is_unreadable { call.or_else(|| CallRef::find(text, self.session)) } else { call };
                if let Some(call) = call {
                    state.resolve(self, &call, Err(CallError::Malformed(message.clone())), None, now);
                }
                Received::Bad(message)
            }
        }
    }

    /// A frame came in that is not text.
    pub fn receive_binary(&self, epoch: u64, now: Instant) -> Received<'static> {
        self.sign_of_life(epoch, now);
        self.records.metrics.bad_frames.count();
        Received::Bad("Bridge messages are text frames.".into())
    }

    /// Puts an `error` frame in the queue, if the app understands such frames.
    pub fn send_error(&self, message: &str) {
        if self.features.any() {
            self.send(protocol::error_frame(message));
        }
    }

    /// Puts a frame in the queue. If the app does not read, frames that tell it something give way.
    pub fn send(&self, frame: Vec<u8>) {
        let mut state = self.state();
        if state.outbox_bytes + frame.len() <= self.limits.queue_bytes {
            state.push(Outgoing::Other(frame));
        }
    }

    fn ignore_result(&self) {
        self.records.metrics.results_ignored.count();
        tracing::debug!(session.id = %self.session.short(), "ignored a result for no call in flight");
    }

    fn outcome(&self, answer: Answer<'_>, message: &Bytes) -> Outcome {
        let check_size = |text: &str| {
            let (size, limit) = (text.len(), self.limits.result_bytes);
            if size <= limit {
                return Ok(());
            }
            self.records.limit(Limit::ResultBytes);
            Err(CallError::TooLarge { size, limit })
        };
        let fits = |text: &str| check_size(text).map(|()| message.slice_ref(text.as_bytes()));
        Ok(match answer {
            Answer::Content("{}") => Reply::Content(Bytes::from_static(b"{}")),
            Answer::Content(content) => Reply::Content(fits(content)?),
            Answer::Result(result) => Reply::Result(fits(result)?),
            Answer::Failed(error) => {
                check_size(&error)?;
                Reply::Failed(error.into_owned())
            }
            Answer::RpcError { code, message, data } => {
                check_size(&message)?;
                Reply::RpcError { code, message: message.into_owned(), data: data.map(fits).transpose()? }
            }
            // Only apps that resume calls are asked about calls that they may never have seen.
            Answer::UnknownRequest => Reply::Failed("The app does not know this call.".into()),
        })
    }
}

/// This process, as apps that resume calls see it: another one knows nothing of their calls.
fn instance() -> &'static str {
    static INSTANCE: LazyLock<String> = LazyLock::new(|| SessionId::random().short().to_string());
    &INSTANCE
}

/// A call in flight. Dropping it abandons it.
#[derive(Debug)]
pub struct Call {
    bridge: Arc<Bridge>,
    number: u64,
    reply: oneshot::Receiver<Ended>,
    /// What the result has of the memory.
    room: Option<Share>,
    reports: Option<mpsc::Receiver<Progress>>,
    deadline: Instant,
    timeout: Duration,
    cancel_on_drop: bool,
    ended: bool,
    end: Option<(CallEnd, Option<Duration>)>,
}

impl Call {
    /// How it ended, and how long the app took, if it answered; `None` if it has not.
    pub fn end(&self) -> Option<(CallEnd, Option<Duration>)> {
        self.end
    }

    /// Where its end is to be told.
    pub fn records(&self) -> &Records {
        &self.bridge.records
    }
}

impl crate::mcp::Call for Call {
    async fn next(&mut self, until: Instant) -> Event {
        let reply = &mut self.reply;
        // Reports that wait to be told do not carry a call past its time.
        if Instant::now() >= self.deadline {
            self.reports = None;
        }
        let wait = async {
            let outcome = match &mut self.reports {
                None => reply.await,
                Some(reports) => tokio::select! {
                    biased;
                    // Reports were queued before the result: they come first.
                    Some(progress) = reports.recv() => return Err(progress),
                    outcome = reply => outcome,
                },
            };
            Ok(outcome.unwrap_or_else(|_| Ended::without_answer(Err(CallError::Lost))))
        };
        let Ended { outcome, app_time, room } =
            match tokio::time::timeout_at(until.min(self.deadline).into(), wait).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(progress)) => return Event::Progress(progress),
                Err(_) if until < self.deadline => return Event::Quiet,
                Err(_) => {
                    self.abandon(CancelReason::Timeout, true);
                    Ended::without_answer(Err(CallError::Timeout(self.timeout)))
                }
            };
        self.ended = true;
        self.room = room;
        self.end = Some(match &outcome {
            Ok(Reply::Content(_) | Reply::Result(_)) => (CallEnd::Ok, Some(app_time)),
            Ok(Reply::Failed(_)) => (CallEnd::ToolError, Some(app_time)),
            Ok(Reply::RpcError { .. }) => (CallEnd::RpcError, Some(app_time)),
            Err(error) => (error.end(), None),
        });
        Event::Ended(outcome.unwrap_or_else(|error| Reply::Failed(error.to_string())))
    }
}

impl Call {
    fn abandon(&self, reason: CancelReason, tell: bool) {
        self.bridge.state().abandon(&self.bridge, self.number, reason, tell, Instant::now());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.ended {
            self.abandon(CancelReason::ClientDisconnected, self.cancel_on_drop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    const LIMITS: BridgeLimits = BridgeLimits {
        calls: 4,
        call_bytes: 100,
        queue_bytes: 2000,
        result_bytes: 1000,
        progress_bytes: 100,
        json_depth: 9,
        resume_grace: Duration::from_secs(15),
    };

    /// What can happen to a bridge. Numbers choose among what there is.
    #[derive(Debug, Clone)]
    enum Step {
        Call {
            id: u8,
        },
        DropCall(prop::sample::Index),
        Cancel {
            id: u8,
        },
        Attach,
        Detach {
            stale: bool,
        },
        EndGrace {
            stale: bool,
        },
        /// The socket takes a frame; from a frame that is lost on, nothing arrives any more.
        Send {
            lost: bool,
        },
        Answer(prop::sample::Index),
        AnswerTwice(prop::sample::Index),
        DenyKnowing(prop::sample::Index),
        Wait {
            seconds: u64,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        use prop::sample::Index;
        let step = prop_oneof![
            4 => (0..3u8).prop_map(|id| Step::Call { id }),
            1 => any::<Index>().prop_map(Step::DropCall),
            1 => (0..3u8).prop_map(|id| Step::Cancel { id }),
            3 => Just(Step::Attach),
            2 => any::<bool>().prop_map(|stale| Step::Detach { stale }),
            1 => any::<bool>().prop_map(|stale| Step::EndGrace { stale }),
            6 => prop::bool::weighted(0.1).prop_map(|lost| Step::Send { lost }),
            4 => any::<Index>().prop_map(Step::Answer),
            1 => any::<Index>().prop_map(Step::AnswerTwice),
            3 => any::<Index>().prop_map(Step::DenyKnowing),
            1 => (1..40u64).prop_map(|seconds| Step::Wait { seconds }),
        ];
        prop::collection::vec(step, 1..120)
    }

    /// An app that keeps the rules, and the network between.
    #[derive(Default)]
    struct World {
        epoch: u64,
        broken: bool,
        /// How often each call ran.
        ran: HashMap<u64, u32>,
        answered: HashSet<u64>,
        /// What the newest hello named.
        pending: Vec<u64>,
        calls: Vec<Call>,
    }

    impl World {
        /// A frame reaches the app.
        fn arrive(&mut self, frame: &[u8]) {
            let frame: serde_json::Value = serde_json::from_slice(frame).unwrap();
            let number =
                |id: &serde_json::Value| id.as_str().unwrap().rsplit(':').next().unwrap().parse::<u64>().unwrap();
            match frame["type"].as_str().unwrap() {
                "hello" => self.pending = frame["pending"].as_array().unwrap().iter().map(number).collect(),
                "invoke_tool" => *self.ran.entry(number(&frame["request_id"])).or_default() += 1,
                "cancel_tool" => {}
                other => panic!("{other}"),
            }
        }

        fn say(&self, bridge: &Bridge, number: u64, rest: &str, now: Instant) {
            let session = bridge.session;
            let text = format!(r#"{{"type":"invoke_result","request_id":"{session}:{number}",{rest}}}"#);
            let message = Bytes::from(text);
            let text = std::str::from_utf8(&message).unwrap();
            assert_eq!(bridge.receive(self.epoch, &message, text, Ok(None), now), Received::Done);
        }
    }

    fn run(steps: Vec<Step>, resume: bool) {
        let features = Features { resume, cancel: true, deadline: true, ..Features::default() };
        let mut now = Instant::now();
        let bridge = Bridge::new(SessionId::random(), Spelling::Snake, features, LIMITS, Arc::default(), now);
        let bridge = Arc::new(bridge);
        let mut world = World::default();
        for step in steps {
            match step {
                Step::Call { id } => {
                    let request = CallRequest {
                        client_id: &id.to_string(),
                        tool: "t",
                        arguments: "{}",
                        kept_bytes: 20 + 10 * usize::from(id),
                        progress: false,
                        context: Context::default(),
                        timeout: Duration::from_secs(30),
                        cancel_on_drop: true,
                    };
                    world.calls.extend(bridge.call(request, now));
                }
                Step::DropCall(which) if !world.calls.is_empty() => {
                    let which = which.index(world.calls.len());
                    world.calls.swap_remove(which);
                }
                Step::Cancel { id } => bridge.cancel(&id.to_string(), now),
                Step::Attach => {
                    if let Attempt::Attached(epoch) = bridge.try_attach(None, now) {
                        assert!(epoch > world.epoch, "epochs increase");
                        (world.epoch, world.broken) = (epoch, false);
                        world.pending.clear();
                    }
                }
                Step::Detach { stale } => {
                    bridge.detach(world.epoch.saturating_sub(u64::from(stale)), now);
                }
                Step::EndGrace { stale } => bridge.end_grace(world.epoch.saturating_sub(u64::from(stale)), now),
                Step::Send { lost } => {
                    if let Next::Send(frame) = bridge.next_frame(world.epoch, now, Waker::noop()) {
                        world.broken |= lost;
                        if !world.broken {
                            world.arrive(&frame);
                        }
                    }
                }
                Step::Answer(which) | Step::AnswerTwice(which) if !world.broken => {
                    let twice = matches!(step, Step::AnswerTwice(_));
                    let mut ready: Vec<u64> =
                        world.ran.keys().copied().filter(|number| twice || !world.answered.contains(number)).collect();
                    ready.sort_unstable();
                    if !ready.is_empty() {
                        let number = ready[which.index(ready.len())];
                        world.answered.insert(number);
                        world.say(&bridge, number, &format!(r#""ok":true,"content":{number}"#), now);
                    }
                }
                Step::DenyKnowing(which) if !world.broken => {
                    let unseen: Vec<u64> =
                        world.pending.iter().copied().filter(|number| !world.ran.contains_key(number)).collect();
                    if !unseen.is_empty() {
                        let number = unseen[which.index(unseen.len())];
                        world.say(&bridge, number, r#""ok":false,"error":{"code":"unknown_request"}"#, now);
                    }
                }
                Step::Wait { seconds } => {
                    now += Duration::from_secs(seconds);
                    bridge.sweep(now);
                }
                _ => {}
            }
            assert!(world.ran.values().all(|times| *times == 1), "a call ran twice: {:?}", world.ran);
            let state = bridge.state();
            assert!(state.calls.len() <= LIMITS.calls);
            assert!(state.calls.values().map(|call| call.kept_bytes).sum::<usize>() <= LIMITS.call_bytes);
            assert!(state.outbox_bytes <= LIMITS.queue_bytes + 500, "but for hello and cancel frames");
            assert_eq!(state.outbox_bytes, state.outbox.iter().map(Outgoing::len).sum::<usize>());
            assert!(state.attached.is_none() || state.parked.is_none());
            let is_queued = |number: &u64| {
                state.outbox.iter().filter(|out| matches!(out, Outgoing::Invoke(n, _) if n == number)).count()
            };
            for (number, call) in state.calls.iter() {
                // A queued call whose time is over may have been dropped from the queue; its caller ends it.
                let queued = is_queued(number);
                assert!(queued == usize::from(call.sent.is_none()) || (queued == 0 && call.deadline <= now));
            }
        }
        bridge.end(CallError::Deleted, Close::Deleted);
        assert_eq!(bridge.calls_in_flight(), 0);
        for call in &mut world.calls {
            let outcome = call.reply.try_recv().expect("every call ends").outcome;
            if let Ok(Reply::Content(content)) = outcome {
                assert_eq!(content, call.number.to_string(), "its own answer");
            }
        }
    }

    proptest! {
        #[test]
        fn a_call_runs_at_most_once_and_ends_whatever_happens(steps in steps()) {
            run(steps.clone(), true);
            run(steps, false);
        }
    }
}
