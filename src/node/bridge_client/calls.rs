//! The calls of one session: which run, what the finished ones answered, what waits to be sent. No sockets here.
//!
//! A small state machine behind a mutex that is never held across an await. A call is run at most once, however
//! often the proxy names it, and its answer is kept until the proxy is known to have it, or to want it no more: a
//! `hello` that does not list the call, or the end of the call's time. Numbers of calls only grow, so what is
//! forgotten is a range: nothing in it is ever run.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_tungstenite::tungstenite::Utf8Bytes;
use tokio_util::sync::CancellationToken;

use super::frames::{Answer, Invoke, Progress};
use crate::protocol::call_number;

/// The most bytes of a frame with an answer: a little less than the proxy takes in one message.
const MAX_ANSWER_BYTES: usize = 30 * 1024 * 1024;
/// The most bytes of answers that are kept.
const MAX_KEPT_BYTES: usize = 64 * 1024 * 1024;
/// The most calls that are remembered, beside those that run.
const MAX_REMEMBERED: usize = 1024;
/// How much longer than its time a call's answer is kept: the proxy gives the bridge some time to come back.
const KEEP_AFTER_DEADLINE: Duration = Duration::from_secs(30);

const NOT_KEPT: &str = "The tool ran, but its result is not kept any more.";

/// The calls of one session.
#[derive(Debug)]
pub struct Calls {
    session: String,
    max_running: usize,
    state: Mutex<State>,
    /// Tells the writer of the socket that there is something to send.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    is_connected: bool,
    calls: BTreeMap<u64, Call>,
    /// Every call up to this number that is not in `calls` is over.
    forgotten: u64,
    running: usize,
    kept_bytes: usize,
    outbox: VecDeque<Outgoing>,
}

#[derive(Debug)]
enum Call {
    Running {
        cancel: CancellationToken,
        deadline: Option<Instant>,
        /// The newest report that was not sent yet.
        report: Option<String>,
    },
    Finished {
        frame: Utf8Bytes,
        wanted_until: Option<Instant>,
    },
    /// Over, and its answer not kept.
    Spent,
}

#[derive(Debug)]
enum Outgoing {
    Frame(Utf8Bytes),
    Report(u64),
    Answer(u64),
}

/// A call that is to be run.
#[derive(Debug)]
pub struct Started {
    /// Its number: how it is known from now on.
    pub number: u64,
    /// Ends when nobody wants the answer any more.
    pub cancelled: CancellationToken,
    /// When its time is over.
    pub deadline: Option<Instant>,
}

impl Calls {
    /// The calls of a session that has had none yet.
    pub fn new(session: &str, max_running: usize) -> Self {
        Calls { session: session.to_owned(), max_running, state: Mutex::default(), changed: Notify::new() }
    }

    /// The session.
    pub fn session(&self) -> &str {
        &self.session
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- For the socket ----

    /// A socket is there; what is queued from now on is for it.
    pub fn connected(&self) {
        self.state().is_connected = true;
    }

    /// The socket is gone. What waited for it is either named by the next hello or not needed any more.
    pub fn disconnected(&self) {
        let mut state = self.state();
        state.is_connected = false;
        state.outbox.clear();
    }

    /// The proxy says which calls of earlier sockets it still wants.
    pub fn hello(&self, pending: &[Cow<'_, str>]) {
        let mut state = self.state();
        let pending: HashSet<u64> = pending.iter().filter_map(|id| self.number(id)).collect();
        for (number, call) in &mut state.calls {
            match call {
                Call::Running { cancel, .. } if !pending.contains(number) => cancel.cancel(),
                Call::Finished { .. } if !pending.contains(number) => *call = Call::Spent,
                _ => {}
            }
        }
        state.count_bytes();
        for number in pending {
            match state.calls.get(&number) {
                Some(Call::Running { .. }) => {}
                Some(Call::Finished { .. }) => state.outbox.push_back(Outgoing::Answer(number)),
                None if number > state.forgotten => state.push(self.frame(number, &Answer::Unknown)),
                Some(Call::Spent) | None => state.push(self.frame(number, &Answer::Failed(NOT_KEPT.into()))),
            }
        }
        self.changed.notify_one();
    }

    /// The proxy sends a call. `None` if it is not to be run: it is known already, or too many run.
    pub fn start(&self, invoke: &Invoke<'_>, now: Instant) -> Option<Started> {
        let mut state = self.state();
        let Some(number) = self.number(&invoke.request_id) else {
            let answer = Answer::Failed("The app cannot read the call's request_id.".into());
            state.push(answer.frame(&self.session, &invoke.request_id));
            self.changed.notify_one();
            return None;
        };
        let refusal = match state.calls.get(&number) {
            Some(Call::Running { .. }) => return None,
            Some(Call::Finished { .. }) => {
                state.outbox.push_back(Outgoing::Answer(number));
                self.changed.notify_one();
                return None;
            }
            Some(Call::Spent) => NOT_KEPT.into(),
            None if number <= state.forgotten => NOT_KEPT.into(),
            None if state.running >= self.max_running => {
                // Nothing of it was done, so it need not be remembered.
                format!(
                    "The app is busy: it runs {} calls, as many as it may at once. Retry in a moment.",
                    state.running
                )
            }
            None => {
                let cancelled = CancellationToken::new();
                let deadline = invoke.timeout_ms.and_then(|ms| now.checked_add(Duration::from_millis(ms)));
                let call = Call::Running { cancel: cancelled.clone(), deadline, report: None };
                state.calls.insert(number, call);
                state.running += 1;
                return Some(Started { number, cancelled, deadline });
            }
        };
        state.push(self.frame(number, &Answer::Failed(refusal)));
        self.changed.notify_one();
        None
    }

    /// The proxy does not want a call any more.
    pub fn cancel(&self, request_id: &str) {
        if let Some(number) = self.number(request_id)
            && let Some(Call::Running { cancel, .. }) = self.state().calls.get(&number)
        {
            cancel.cancel();
        }
    }

    /// Puts a frame in the queue.
    pub fn send(&self, frame: String) {
        self.state().push(frame);
        self.changed.notify_one();
    }

    /// The next frame to send.
    pub async fn next_frame(&self) -> Utf8Bytes {
        loop {
            if let Some(frame) = self.state().next_frame() {
                return frame;
            }
            self.changed.notified().await;
        }
    }

    /// The proxy does not take messages as large as one that it was sent: the largest answer is given up.
    pub fn give_up_largest(&self) {
        let mut state = self.state();
        let largest = state.calls.iter_mut().filter_map(|(number, call)| match call {
            Call::Finished { frame, .. } => Some((*number, frame)),
            _ => None,
        });
        if let Some((number, frame)) = largest.max_by_key(|(_, frame)| frame.len()) {
            let error =
                format!("The tool's result takes {} bytes, more than the proxy takes in a message.", frame.len());
            *frame = self.frame(number, &Answer::Failed(error)).into();
        }
        state.count_bytes();
    }

    /// Ends all calls: nobody waits for them any more.
    pub fn end(&self) {
        for call in self.state().calls.values() {
            if let Call::Running { cancel, .. } = call {
                cancel.cancel();
            }
        }
    }

    // ---- For the tasks that run calls ----

    /// A call is over. Of one that was cancelled nobody wants to hear.
    pub fn finish(&self, number: u64, answer: &Answer, now: Instant) {
        let mut frame = self.frame(number, answer);
        if frame.len() > MAX_ANSWER_BYTES {
            let error = format!("The tool's result takes {} bytes; the limit is {MAX_ANSWER_BYTES}.", frame.len());
            frame = self.frame(number, &Answer::Failed(error));
        }
        let mut state = self.state();
        let Some(call) = state.calls.get_mut(&number) else { return };
        let Call::Running { cancel, deadline, report } = call else { return };
        // What the last report says comes before the answer.
        let report = report.take();
        *call = if cancel.is_cancelled() {
            Call::Spent
        } else {
            let wanted_until = deadline.map(|deadline| deadline + KEEP_AFTER_DEADLINE);
            Call::Finished { frame: frame.into(), wanted_until }
        };
        let is_wanted = matches!(call, Call::Finished { .. });
        state.running -= 1;
        state.forget(number, now);
        if is_wanted && state.is_connected {
            if let Some(report) = report {
                state.push(report);
            }
            state.outbox.push_back(Outgoing::Answer(number));
            self.changed.notify_one();
        }
    }

    /// A call is under way. A report that was not sent yet is replaced: only the newest matters.
    pub fn report(&self, number: u64, progress: &Progress) {
        let frame = progress.frame(&self.session, &self.request_id(number));
        let mut state = self.state();
        if !state.is_connected {
            return;
        }
        let Some(Call::Running { report, .. }) = state.calls.get_mut(&number) else { return };
        if report.replace(frame).is_none() {
            state.outbox.push_back(Outgoing::Report(number));
            self.changed.notify_one();
        }
    }

    /// How many calls run.
    pub fn running(&self) -> usize {
        self.state().running
    }

    fn number(&self, request_id: &str) -> Option<u64> {
        let (session, number) = request_id.split_once(':')?;
        (session == self.session).then(|| call_number(number)).flatten()
    }

    fn request_id(&self, number: u64) -> String {
        format!("{}:{number}", self.session)
    }

    fn frame(&self, number: u64, answer: &Answer) -> String {
        answer.frame(&self.session, &self.request_id(number))
    }
}

impl State {
    fn push(&mut self, frame: impl Into<Utf8Bytes>) {
        if self.is_connected {
            self.outbox.push_back(Outgoing::Frame(frame.into()));
        }
    }

    fn next_frame(&mut self) -> Option<Utf8Bytes> {
        while let Some(outgoing) = self.outbox.pop_front() {
            match outgoing {
                Outgoing::Frame(frame) => return Some(frame),
                Outgoing::Answer(number) => {
                    if let Some(Call::Finished { frame, .. }) = self.calls.get(&number) {
                        return Some(frame.clone());
                    }
                }
                Outgoing::Report(number) => {
                    if let Some(Call::Running { report, .. }) = self.calls.get_mut(&number)
                        && let Some(frame) = report.take()
                    {
                        return Some(frame.into());
                    }
                }
            }
        }
        None
    }

    fn count_bytes(&mut self) {
        let kept =
            self.calls.values().map(|call| if let Call::Finished { frame, .. } = call { frame.len() } else { 0 });
        self.kept_bytes = kept.sum();
    }

    /// Forgets what is too much or too old, but for the answer of `newest`.
    fn forget(&mut self, newest: u64, now: Instant) {
        for call in self.calls.values_mut() {
            if matches!(call, Call::Finished { wanted_until: Some(until), .. } if *until < now) {
                *call = Call::Spent;
            }
        }
        self.count_bytes();
        for (number, call) in &mut self.calls {
            if self.kept_bytes <= MAX_KEPT_BYTES {
                break;
            }
            if let Call::Finished { frame, .. } = call
                && *number != newest
            {
                self.kept_bytes -= frame.len();
                *call = Call::Spent;
            }
        }
        while self.calls.len() - self.running > MAX_REMEMBERED {
            let is_over = |(number, call): &(&u64, &Call)| **number != newest && !matches!(call, Call::Running { .. });
            let over = self.calls.iter().find(is_over).map(|(number, _)| *number);
            let Some(number) = over else { break };
            self.calls.remove(&number);
            self.forgotten = self.forgotten.max(number);
        }
        self.count_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> Calls {
        let calls = Calls::new("s", 2);
        calls.connected();
        calls
    }

    fn start(calls: &Calls, number: u64) -> Option<Started> {
        let invoke = Invoke {
            request_id: format!("s:{number}").into(),
            tool: "t".into(),
            arguments: "{}",
            progress: false,
            timeout_ms: Some(1000),
            meta: None,
            input_responses: None,
            request_state: None,
        };
        calls.start(&invoke, Instant::now())
    }

    fn finish(calls: &Calls, number: u64) {
        calls.finish(number, &Answer::Content(number.to_string()), Instant::now());
    }

    fn sent(calls: &Calls) -> Vec<String> {
        std::iter::from_fn(|| calls.state().next_frame()).map(|frame| frame.to_string()).collect()
    }

    fn hello(calls: &Calls, pending: &[u64]) -> Vec<String> {
        calls.disconnected();
        calls.connected();
        calls.hello(&pending.iter().map(|number| format!("s:{number}").into()).collect::<Vec<_>>());
        sent(calls)
    }

    #[test]
    fn a_call_runs_once_and_its_answer_is_sent_as_often_as_it_is_asked_for() {
        let calls = calls();
        assert_eq!(start(&calls, 1).unwrap().number, 1);
        assert!(start(&calls, 1).is_none() && sent(&calls).is_empty());
        finish(&calls, 1);
        let answer = sent(&calls);
        assert_eq!(answer.len(), 1);
        assert!(answer[0].contains(r#""request_id":"s:1","ok":true,"content":1"#), "{answer:?}");
        assert!(start(&calls, 1).is_none());
        assert_eq!(sent(&calls), answer);
        assert_eq!(hello(&calls, &[1]), answer);
        assert!(hello(&calls, &[]).is_empty());
        assert!(start(&calls, 1).is_none(), "it is over, but not forgotten");
        assert!(sent(&calls)[0].contains("not kept"));
    }

    #[test]
    fn a_hello_says_what_is_wanted_and_learns_what_is_known() {
        let calls = calls();
        let [wanted, unwanted] = [start(&calls, 1).unwrap(), start(&calls, 2).unwrap()];
        let answers = hello(&calls, &[1, 3]);
        assert!(answers.len() == 1 && answers[0].contains(r#""s:3","ok":false,"error":{"code":"unknown_request"}"#));
        assert!(!wanted.cancelled.is_cancelled() && unwanted.cancelled.is_cancelled());
        finish(&calls, 2);
        assert!(sent(&calls).is_empty(), "nobody wants it");
        finish(&calls, 1);
        assert_eq!(sent(&calls).len(), 1);
        assert!(start(&calls, 3).is_some(), "the proxy sends it again");
    }

    #[test]
    fn what_finishes_without_a_socket_waits_for_the_next_one() {
        let calls = calls();
        start(&calls, 1).unwrap();
        calls.disconnected();
        calls.report(1, &Progress { progress: 1.0, total: None, message: None });
        finish(&calls, 1);
        assert!(sent(&calls).is_empty());
        assert_eq!(hello(&calls, &[1]).len(), 1);
    }

    #[test]
    fn too_many_calls_are_refused_and_may_come_again() {
        let calls = calls();
        start(&calls, 1).unwrap();
        let second = start(&calls, 2).unwrap();
        assert!(start(&calls, 3).is_none());
        assert!(sent(&calls)[0].contains("busy"));
        calls.cancel("s:2");
        assert!(second.cancelled.is_cancelled());
        assert!(start(&calls, 3).is_none(), "it still runs");
        finish(&calls, 2);
        assert!(start(&calls, 3).is_some());
        assert_eq!(calls.running(), 2);
    }

    #[test]
    fn only_the_newest_report_is_sent_and_none_after_the_answer() {
        let calls = calls();
        start(&calls, 1).unwrap();
        let report = |progress: f64| calls.report(1, &Progress { progress, total: None, message: None });
        report(1.0);
        report(2.0);
        let [frame] = &sent(&calls)[..] else { panic!() };
        assert!(frame.contains(r#""progress":2}"#), "{frame}");
        report(3.0);
        finish(&calls, 1);
        report(4.0);
        let [last, answer] = &sent(&calls)[..] else { panic!() };
        assert!(last.contains(r#""progress":3}"#) && answer.contains("invoke_result"), "{last} {answer}");
    }

    #[test]
    fn memory_is_bounded_and_what_is_forgotten_is_never_run() {
        let calls = calls();
        start(&calls, 1).unwrap();
        for number in 2..MAX_REMEMBERED as u64 + 10 {
            start(&calls, number).unwrap();
            finish(&calls, number);
        }
        sent(&calls);
        assert_eq!(calls.state().calls.len(), MAX_REMEMBERED + 1, "and the one that runs");
        assert!(start(&calls, 3).is_none());
        assert!(sent(&calls)[0].contains("not kept"));
        finish(&calls, 1);
        assert_eq!(sent(&calls).len(), 1, "a call that runs is not forgotten");

        let large = Answer::Content(format!("\"{}\"", "x".repeat(25 << 20)));
        for number in 5000..5004 {
            start(&calls, number).unwrap();
            calls.finish(number, &large, Instant::now());
        }
        assert!(calls.state().kept_bytes <= MAX_KEPT_BYTES);
        let too_large = Answer::Content(format!("\"{}\"", "x".repeat(31 << 20)));
        start(&calls, 6000).unwrap();
        calls.finish(6000, &too_large, Instant::now());
        assert!(sent(&calls).last().unwrap().contains("the limit is"));
        calls.give_up_largest();
        assert!(hello(&calls, &[5003])[0].contains("more than the proxy takes"));
        calls.finish(6001, &Answer::Content("1".into()), Instant::now());
        start(&calls, 6002).unwrap();
        calls.finish(6002, &Answer::Content("1".into()), Instant::now() + Duration::from_secs(60));
        assert!(calls.state().kept_bytes < 1000, "answers that nobody waits for any more are dropped");
    }
}
