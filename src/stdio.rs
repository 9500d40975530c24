//! The stdio program: what MCP clients start that can only talk to a process, in front of the proxy's MCP endpoint.
//!
//! Each line on stdin is a message and becomes one POST; each answer, and each event on the way to it, becomes one
//! line on stdout. Lines are relayed as they were written. Nothing but messages goes to stdout; logs go to stderr.
//!
//! [`run`] is one loop that owns all state; every message is a task of its own ([`relay`]), so that a slow call
//! holds up nobody. It ends when stdin does, once everything is answered, and at once when it is told to stop, when
//! stdout is closed, or when its parent process is gone: a client that crashed must not leave it behind.
//!
//! A *legacy* client begins with `initialize`, which may name the session; the member that does is not sent on. A
//! *modern* one (2026-07-28) never sends it, so its session is named by a flag or the environment. An unbound
//! `server/discover` is answered as a legacy server would, so that clients of both eras go on to `initialize`.
//!
//! | module | what it is |
//! |---|---|
//! | [`lines`] | stdin and stdout as lines |
//! | [`message`] | a line, read as far as needed |
//! | [`endpoint`] | URL, token and session |
//! | [`relay`] | a message's way to the server and back |
//! | [`headers`] | what modern messages repeat in headers |
//! | [`events`] | server-sent events |
//! | [`answer`] | what came back, judged |

pub mod answer;
pub mod endpoint;
pub mod events;
pub mod headers;
pub mod lines;
pub mod message;
pub mod relay;

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{HeaderValue, StatusCode};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cancel::same_id;
use crate::jsonrpc::{INVALID_PARAMS, METHOD_NOT_FOUND};
use endpoint::{Binding, Options, session_of_member};
use lines::{Line, MAX_LINE_BYTES, Output};
use message::{Ids, Outgoing};
use relay::{Relay, Ticket};

/// Messages that are being taken care of at once; a request more is answered that the program is busy.
pub const MAX_IN_FLIGHT: usize = 1024;
/// Tasks at which stdin is not read any more: answers are not taken, and their number must end somewhere.
const MAX_TASKS: usize = 2 * MAX_IN_FLIGHT;
/// How long the answers may take after stdin has ended: the proxy's default bound for a call, and a little.
pub const DRAIN: Duration = Duration::from_secs(130);
/// How often it is looked whether the parent process is still there.
#[cfg(unix)]
const PARENT_CHECK: Duration = Duration::from_secs(1);

/// Relays `input` and `output` until one of the ends that the module speaks of.
///
/// # Errors
/// If no thread can be started.
pub async fn run(
    options: &Options,
    input: impl Read + Send + 'static,
    output: impl Write + Send + 'static,
    stop: CancellationToken,
) -> io::Result<()> {
    let parent_gone = parent_gone();
    tokio::pin!(parent_gone);
    let (output, written) = lines::write(output)?;
    let mut lines = lines::read(input)?;
    let mut shim = Shim::new(options, output.clone());
    let mut drained: Option<Instant> = None;
    loop {
        let deadline = drained.unwrap_or_else(Instant::now);
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            () = &mut parent_gone => return Ok(()),
            () = output.closed() => return Ok(()),
            // What has ended makes room before the next line is looked at.
            Some(ended) = shim.tasks.join_next_with_id() => shim.forget(ended),
            line = lines.recv(), if drained.is_none() && shim.tasks.len() < MAX_TASKS => match line {
                Some(line) => shim.accept(line),
                None => {
                    shim.end_subscriptions();
                    drained = Some(Instant::now() + DRAIN);
                }
            },
            () = tokio::time::sleep_until(deadline), if drained.is_some() => {
                tracing::warn!(unanswered = shim.tasks.len(), "requests were not answered in time");
                return Ok(());
            }
        }
        if drained.is_some() && shim.tasks.is_empty() {
            break;
        }
    }
    drop((shim, output));
    tokio::select! {
        () = stop.cancelled() => {}
        () = &mut parent_gone => {}
        // An error means that the thread is gone.
        _ = written => {}
    }
    Ok(())
}

/// Resolves when the process that started this one is gone; its pipes may live on in other processes.
#[cfg(unix)]
async fn parent_gone() {
    let parent = std::os::unix::process::parent_id();
    let mut checks = tokio::time::interval(PARENT_CHECK);
    while std::os::unix::process::parent_id() == parent {
        checks.tick().await;
    }
    tracing::debug!("the parent process is gone");
}

/// A parent's end closes its pipes, which is all that can be known of it.
#[cfg(not(unix))]
async fn parent_gone() {
    std::future::pending().await
}

/// The state of one client.
#[derive(Debug)]
struct Shim {
    /// Where to send to, or why it cannot be.
    relay: Result<Arc<Relay>, String>,
    session: Binding,
    output: Output,
    tasks: JoinSet<()>,
    in_flight: HashMap<Id, InFlight>,
    /// The last handshake, which later messages wait for.
    handshake: Option<CancellationToken>,
}

/// A request that is being taken care of.
#[derive(Debug)]
struct InFlight {
    /// The id's text; `None` for notifications and batches, which cannot be cancelled.
    id: Option<String>,
    is_modern: bool,
    is_subscription: bool,
    cancelled: CancellationToken,
    sent: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Shim {
    fn new(options: &Options, output: Output) -> Self {
        let relay = options.endpoint().and_then(|endpoint| Relay::new(endpoint, output.clone()));
        if let Err(why) = &relay {
            tracing::error!("{why}");
        }
        Shim {
            relay: relay.map(Arc::new),
            session: options.binding(),
            output,
            tasks: JoinSet::new(),
            in_flight: HashMap::new(),
            handshake: None,
        }
    }

    /// Takes care of a line.
    fn accept(&mut self, line: Line) {
        let parsed = match line {
            Line::Whole(line) => Outgoing::parse(line),
            Line::TooLong(prefix) => Err(Outgoing::too_long(&prefix, MAX_LINE_BYTES)),
        };
        match parsed {
            Ok(message) if message.cancels.is_some() => self.cancel(message),
            Ok(message) => self.send(message),
            Err(error) => self.answer(error),
        }
    }

    /// Starts a message on its way, if it has one.
    fn send(&mut self, mut message: Outgoing) {
        let named = if message.method == "initialize" { message.take_session() } else { None };
        let bound = match named.as_deref().and_then(session_of_member) {
            Some(binding) => {
                self.session = binding;
                self.session.as_ref().map(|_| ()).map_err(|why| (INVALID_PARAMS, why.clone()))
            }
            None => Ok(()),
        };
        let (relay, session) = match bound.and_then(|()| self.route(&message)) {
            Ok(route) => route,
            Err((code, why)) => {
                tracing::warn!(method = ?message.method, why, "not sent");
                if let Some(error) = message.ids.error(code, &why, None) {
                    self.answer(error);
                }
                return;
            }
        };
        let ticket = self.ticket(&message);
        let in_flight = InFlight {
            id: if let Ids::One(id) = &message.ids { Some(id.clone()) } else { None },
            is_modern: message.version.is_some(),
            is_subscription: message.method == "subscriptions/listen",
            cancelled: ticket.cancelled.clone(),
            sent: Arc::clone(&ticket.sent),
            task: self.tasks.spawn(async move { relay.run(message, session, ticket).await }),
        };
        self.in_flight.insert(in_flight.task.id(), in_flight);
    }

    /// Where a message goes, or the error that answers it.
    fn route(&self, message: &Outgoing) -> Result<(Arc<Relay>, Option<HeaderValue>), (i64, String)> {
        let refuse = |why: &str| {
            let code = match &*message.method {
                "server/discover" => METHOD_NOT_FOUND,
                "initialize" => INVALID_PARAMS,
                _ => i64::from(StatusCode::BAD_REQUEST.as_u16()),
            };
            Err((code, why.to_owned()))
        };
        let relay = match &self.relay {
            Ok(relay) => Arc::clone(relay),
            Err(why) => return refuse(why),
        };
        if message.is_request() && self.in_flight.len() >= MAX_IN_FLIGHT {
            let why = format!("{MAX_IN_FLIGHT} messages are being taken care of, which is the limit; retry later.");
            return Err((StatusCode::TOO_MANY_REQUESTS.as_u16().into(), why));
        }
        match &self.session {
            Ok(session) => Ok((relay, Some(session.clone()))),
            Err(why) if relay.needs_session() => refuse(why),
            Err(_) => Ok((relay, None)),
        }
    }

    /// A legacy handshake is `initialize` and then `notifications/initialized`, and each is answered before what
    /// comes after it is sent: on connections of their own, messages would overtake each other.
    fn ticket(&mut self, message: &Outgoing) -> Ticket {
        if message.version.is_some() {
            return Ticket::default();
        }
        let after = self.handshake.clone();
        let opens = matches!(&*message.method, "initialize" | "notifications/initialized").then(|| {
            let handshake = CancellationToken::new();
            self.handshake = Some(handshake.clone());
            handshake.drop_guard()
        });
        Ticket { after, opens, ..Ticket::default() }
    }

    /// A cancelled request is not answered any more. A modern one is cancelled by closing its connection, a legacy
    /// one by telling the server. An id that two requests have says nothing.
    fn cancel(&mut self, message: Outgoing) {
        let id = message.cancels.as_deref().unwrap_or_default();
        let mut hits = self.in_flight.values().filter(|request| request.id.as_deref().is_some_and(|i| same_id(i, id)));
        match (hits.next(), hits.next()) {
            (Some(request), None) if request.is_modern => return request.task.abort(),
            (Some(request), None) => {
                request.cancelled.cancel();
                if !request.sent.load(Ordering::Relaxed) {
                    return;
                }
            }
            // Ambiguous, or late. The server is told nothing: other clients of the session use the same small ids.
            _ => return,
        }
        self.send(message);
    }

    /// Sends a line of our own to the client.
    fn answer(&mut self, line: Vec<u8>) {
        let output = self.output.clone();
        self.tasks.spawn(async move {
            // If stdout is closed, the program is ending.
            let _sent = output.send(line).await;
        });
    }

    /// A task has ended.
    fn forget(&mut self, ended: Result<(Id, ()), tokio::task::JoinError>) {
        let id = match ended {
            Ok((id, ())) => id,
            Err(error) => {
                if error.is_panic() {
                    tracing::error!(%error, "a request's task crashed");
                }
                error.id()
            }
        };
        self.in_flight.remove(&id);
    }

    /// Nobody is left to be notified, and nothing else ends these requests.
    fn end_subscriptions(&self) {
        for request in self.in_flight.values().filter(|request| request.is_subscription) {
            request.task.abort();
        }
    }
}
