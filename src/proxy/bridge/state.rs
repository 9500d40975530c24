//! The books of a bridge: which socket is connected, which calls are in flight, what waits to be sent.
//!
//! Plain data behind [`super::Bridge`]'s mutex. Nothing here waits, and time is passed in.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::task::Waker;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::{Bridge, CallError, CallRequest, Next, Outcome};
use crate::auth::TokenHash;
use crate::cancel::Tombstones;
use crate::mcp::Progress;
use crate::protocol::{self, CallRef, CancelReason, Close};
use crate::proxy::memory::Share;

#[derive(Debug)]
pub(super) struct State {
    /// Of the newest socket; 0 before the first.
    pub(super) epoch: u64,
    pub(super) attached: Option<Attached>,
    /// Calls wait for the app to come back after its socket went.
    pub(super) parked: Option<Parked>,
    /// The process stops: a socket that goes now does not come back.
    pub(super) is_final: bool,
    /// The number of the newest call.
    pub(super) number: u64,
    pub(super) calls: Calls,
    pub(super) outbox: VecDeque<Outgoing>,
    pub(super) outbox_bytes: usize,
    /// When the app last showed itself.
    pub(super) last_sign: Instant,
    pub(super) tombstones: Tombstones,
    /// Set when the session ends: from then on calls fail with the one, and sockets are closed with the other.
    pub(super) ended: Option<(CallError, Close)>,
}

/// A connected socket.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) epoch: u64,
    pub(super) since: Instant,
    /// How long the app took to answer its last ping.
    pub(super) ping: Option<Duration>,
    pub(super) close: Option<Close>,
    /// It is closed without a further word, and nothing that it says counts.
    pub(super) is_cut: bool,
    /// The hash of the token that it came with.
    pub(super) token: Option<TokenHash>,
    /// Newcomers that wait for a sign of life from this socket.
    pub(super) probes: Vec<oneshot::Sender<()>>,
    pub(super) probe_due: bool,
    /// Wakes the task that owns the socket, while it has nothing to do.
    pub(super) waker: Option<Waker>,
}

/// The calls of a socket that has gone wait for the next one.
#[derive(Debug)]
pub(super) struct Parked {
    /// The socket that has gone.
    pub(super) epoch: u64,
    pub(super) until: Instant,
    /// Dropped with this, it tells whoever waits for the end of the grace.
    pub(super) _awaited: oneshot::Sender<()>,
}

/// A call in flight.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) client_id: Box<str>,
    pub(super) kept_bytes: usize,
    pub(super) reply: oneshot::Sender<Ended>,
    pub(super) progress: Option<ProgressPipe>,
    pub(super) deadline: Instant,
    pub(super) timeout: Duration,
    /// The epoch of the socket that the frame was handed to: the app may have it.
    pub(super) sent: Option<u64>,
    /// When.
    pub(super) sent_at: Instant,
    /// The frame, still open at its end, to be sent again if the app never saw it.
    pub(super) frame: Option<Vec<u8>>,
}

/// The calls in flight by their numbers, and what they keep together.
#[derive(Debug, Default)]
pub(super) struct Calls {
    by_number: BTreeMap<u64, Pending>,
    kept_bytes: usize,
}

impl Deref for Calls {
    type Target = BTreeMap<u64, Pending>;

    fn deref(&self) -> &Self::Target {
        &self.by_number
    }
}

impl Calls {
    pub(super) fn insert(&mut self, number: u64, call: Pending) {
        self.kept_bytes += call.kept_bytes;
        if let Some(replaced) = self.by_number.insert(number, call) {
            self.kept_bytes -= replaced.kept_bytes;
        }
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Pending> {
        self.by_number.get_mut(&number)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Pending> {
        self.by_number.remove(&number).inspect(|call| self.kept_bytes -= call.kept_bytes)
    }

    pub(super) fn pop_first(&mut self) -> Option<(u64, Pending)> {
        self.by_number.pop_first().inspect(|(_, call)| self.kept_bytes -= call.kept_bytes)
    }
}

/// What became of a call.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) outcome: Outcome,
    /// How long the app had it.
    pub(super) app_time: Duration,
    /// What the result has of the memory.
    pub(super) room: Option<Share>,
}

impl Ended {
    pub(super) fn without_answer(outcome: Outcome) -> Self {
        Ended { outcome, app_time: Duration::ZERO, room: None }
    }
}

#[derive(Debug)]
pub(super) struct ProgressPipe {
    pub(super) reports: mpsc::Sender<Progress>,
    pub(super) last: f64,
}

#[derive(Debug)]
pub(super) enum Outgoing {
    /// An `invoke_tool` frame that is still open at its end.
    Invoke(u64, Vec<u8>),
    /// Any other frame.
    Other(Vec<u8>),
}

impl Outgoing {
    pub(super) fn len(&self) -> usize {
        match self {
            Outgoing::Invoke(_, frame) | Outgoing::Other(frame) => frame.len(),
        }
    }
}

impl State {
    pub(super) fn admission(&self, bridge: &Bridge, request: &CallRequest<'_>, now: Instant) -> Result<(), CallError> {
        if let Some((error, _)) = &self.ended {
            return Err(error.clone());
        }
        let is_connected = self.attached.as_ref().is_some_and(|attached| attached.close.is_none());
        let is_awaited = self.parked.as_ref().is_some_and(|parked| now < parked.until);
        if !is_connected && !is_awaited {
            return Err(CallError::NotConnected);
        }
        if self.calls.len() >= bridge.limits.calls {
            return Err(CallError::Busy(bridge.limits.calls));
        }
        if self.calls.kept_bytes.saturating_add(request.kept_bytes) > bridge.limits.call_bytes {
            return Err(CallError::BusyBytes(bridge.limits.call_bytes));
        }
        Ok(())
    }

    /// Lets a call in and gives it a number.
    pub(super) fn admit(&mut self, bridge: &Bridge, request: &CallRequest<'_>, now: Instant) -> Result<u64, CallError> {
        self.admission(bridge, request, now)?;
        if self.tombstones.take(request.client_id, now) {
            return Err(CallError::Cancelled);
        }
        self.number += 1;
        Ok(self.number)
    }

    pub(super) fn push(&mut self, outgoing: Outgoing) {
        self.outbox_bytes += outgoing.len();
        self.outbox.push_back(outgoing);
        self.wake();
    }

    /// Wakes the task of the connected socket.
    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.attached.as_mut().and_then(|attached| attached.waker.take()) {
            waker.wake();
        }
    }

    pub(super) fn close_or_wait(&mut self, epoch: u64, waker: &Waker) -> Next {
        let Some(attached) = self.attached.as_mut().filter(|attached| attached.epoch == epoch) else {
            return Next::Close(Close::Replaced);
        };
        if let Some(close) = attached.close {
            return Next::Close(close);
        }
        match &mut attached.waker {
            Some(current) => current.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        Next::Idle
    }

    /// Forgets the frames of calls that were not sent.
    pub(super) fn drop_unsent(&mut self) {
        self.outbox.retain(|outgoing| matches!(outgoing, Outgoing::Other(_)));
        self.outbox_bytes = self.outbox.iter().map(Outgoing::len).sum();
    }

    /// Takes a call out of flight without an answer of its app.
    pub(super) fn abandon(
        &mut self,
        bridge: &Bridge,
        number: u64,
        reason: CancelReason,
        tell: bool,
        now: Instant,
    ) -> Option<Pending> {
        let call = self.calls.remove(number)?;
        self.tombstones.answered(&call.client_id, now);
        if call.sent.is_none() {
            let mine = |outgoing: &Outgoing| matches!(outgoing, Outgoing::Invoke(n, _) if *n == number);
            if let Some(at) = self.outbox.iter().position(mine)
                && let Some(outgoing) = self.outbox.remove(at)
            {
                self.outbox_bytes -= outgoing.len();
            }
        } else if tell && bridge.features.cancel && self.attached.is_some() {
            self.push(Outgoing::Other(protocol::cancel_frame(bridge.session, number, reason, bridge.spelling)));
        }
        Some(call)
    }

    pub(super) fn resolve(
        &mut self,
        bridge: &Bridge,
        call: &CallRef<'_>,
        outcome: Outcome,
        room: Option<Share>,
        now: Instant,
    ) {
        let number = call.number_in(bridge.session);
        match number.filter(|number| self.calls.get(number).is_some_and(|call| call.sent.is_some())) {
            Some(number) => self.resolve_number(number, outcome, room, now),
            None => bridge.ignore_result(),
        }
    }

    /// The app never saw a call that an earlier socket carried: it is sent again, as the same call.
    pub(super) fn redeliver(&mut self, bridge: &Bridge, call: &CallRef<'_>, now: Instant) {
        let number = call.number_in(bridge.session);
        let Some((number, call)) =
            number.and_then(|n| Some((n, self.calls.get_mut(n).filter(|call| call.sent.is_some())?)))
        else {
            return bridge.ignore_result();
        };
        // Of a call that this very socket carried, the app cannot say so: it has forgotten it.
        if call.sent == Some(self.epoch) {
            let error = CallError::Malformed("It says that it does not know the call.".into());
            return self.resolve_number(number, Err(error), None, now);
        }
        call.sent = None;
        if let Some(mut frame) = call.frame.take() {
            protocol::mark_redelivery(&mut frame);
            self.push(Outgoing::Invoke(number, frame));
        }
    }

    fn resolve_number(&mut self, number: u64, outcome: Outcome, room: Option<Share>, now: Instant) {
        if let Some(call) = self.calls.remove(number) {
            self.tombstones.answered(&call.client_id, now);
            call.answer(outcome, room, now);
        }
    }

    /// Ends all calls: those that the app may have, and those that it cannot have.
    pub(super) fn fail_all(&mut self, sent: &CallError, unsent: &CallError, now: Instant) {
        self.outbox.clear();
        self.outbox_bytes = 0;
        while let Some((_, call)) = self.calls.pop_first() {
            let error = if call.sent.is_some() { sent } else { unsent };
            self.finish(call, Err(error.clone()), now);
        }
    }

    pub(super) fn finish(&mut self, call: Pending, outcome: Outcome, now: Instant) {
        self.tombstones.answered(&call.client_id, now);
        call.answer(outcome, None, now);
    }

    /// False if `epoch` is not the connected socket's, or it is cut.
    pub(super) fn sign_of_life(&mut self, epoch: u64, now: Instant) -> bool {
        let current = self.attached.as_mut().filter(|attached| attached.epoch == epoch && !attached.is_cut);
        let Some(attached) = current else { return false };
        self.last_sign = now;
        for probe in attached.probes.drain(..) {
            let _gone = probe.send(());
        }
        true
    }
}

impl Pending {
    /// Ends it without an answer of its app.
    pub(super) fn finish(self, error: CallError) {
        let _gone = self.reply.send(Ended::without_answer(Err(error)));
    }

    fn answer(self, outcome: Outcome, room: Option<Share>, now: Instant) {
        let app_time = now.saturating_duration_since(self.sent_at);
        // A caller that has gone has no use for the outcome.
        let _gone = self.reply.send(Ended { outcome, app_time, room });
    }

    pub(super) fn report(&mut self, progress: protocol::Progress<'_>) {
        let Some(pipe) = &mut self.progress else { return };
        let Ok(value) = progress.progress.parse::<f64>() else { return };
        // MCP: progress MUST increase with each notification.
        if value > pipe.last {
            pipe.last = value;
            let own = |text: Option<&str>| text.map(str::to_owned);
            let report = Progress {
                progress: progress.progress.to_owned(),
                total: own(progress.total),
                message: own(progress.message),
            };
            let _full = pipe.reports.try_send(report);
        }
    }
}
