//! The app's end of a bridge: registers what a [`Lender`] lends, keeps a socket open, runs the calls that come.
//!
//! One task owns the socket and everything that is not a call; each call has a task of its own, which goes on when
//! the socket goes. What is known of calls lives in [`Calls`]. A session lasts until the proxy forgets it; then
//! another one is registered, with another MCP URL.

pub mod calls;
pub mod frames;
mod proxy;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use tokio::sync::{Notify, watch};
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Bytes, Message};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::backoff::Backoff;
use crate::protocol::{self, Close};
use calls::{Calls, Started};
use frames::{Answer, FromProxy, Invoke, PONG, Progress};
use proxy::{Failure, Proxy, Socket};

pub use proxy::{BridgeError, Options, Session};

/// How often the proxy is asked whether it is alive.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// How long the proxy may be silent.
const SILENCE: Duration = Duration::from_secs(50);
/// How long the network may take for one frame, be it a result of megabytes.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to look for the reason when a frame cannot be sent.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a tool that is cancelled may take to stop, and how long goodbyes may take.
const WIND_DOWN: Duration = Duration::from_secs(5);
/// How much later than the proxy a call's time is over here, so that its caller hears of it from the proxy.
const DEADLINE_SLACK: Duration = Duration::from_secs(1);

/// What is lent: tools, and what runs them.
pub trait Lender: Send + Sync + 'static {
    /// The JSON text of a registration's `tools`, an array, as it is now and whenever it changes.
    fn tools(&self) -> watch::Receiver<Arc<str>>;

    /// Runs a tool. When `cancelled` ends, nobody wants the answer any more.
    fn call(
        &self,
        call: ToolCall,
        progress: ProgressSink,
        cancelled: CancellationToken,
    ) -> impl Future<Output = Answer> + Send;
}

/// A call to a [`Lender`]. All but the name is JSON text.
#[derive(Debug, Clone)]
pub struct ToolCall {
    /// The tool's name.
    pub tool: String,
    /// The arguments, an object.
    pub arguments: String,
    /// The request's `_meta`, without MCP's own keys.
    pub meta: Option<String>,
    /// Answers to an earlier `input_required` result.
    pub input_responses: Option<String>,
    /// The state of an earlier `input_required` result.
    pub request_state: Option<String>,
}

/// Where a call tells how far it is.
#[derive(Debug, Clone)]
pub struct ProgressSink {
    calls: Arc<Calls>,
    number: u64,
    is_wanted: bool,
}

impl ProgressSink {
    /// Tells the caller, if it wants to know.
    pub fn report(&self, progress: &Progress) {
        if self.is_wanted {
            self.calls.report(self.number, progress);
        }
    }
}

/// How a socket ended.
#[derive(Debug)]
enum End {
    Stopped,
    Reconnect,
    Closed(u16, String),
    Broken(String),
}

/// How the bridge is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It is being registered or connected.
    Connecting,
    /// Calls can come.
    Connected,
    /// The proxy has forgotten the session; another one is registered soon.
    Unregistered,
    /// It does not work now, and why; another attempt follows.
    Waiting(String),
}

/// The client of one proxy for one lender.
pub struct BridgeClient<L> {
    lender: Arc<L>,
    proxy: Proxy,
    tasks: TaskTracker,
    told: Mutex<Told>,
    state: watch::Sender<State>,
    /// Somebody wants another socket, or the next attempt, now.
    reconnect: Notify,
}

/// Which tools the proxy knows.
#[derive(Debug, Default)]
struct Told {
    confirmed: Arc<str>,
    sent: Option<Arc<str>>,
}

impl<L: Lender> BridgeClient<L> {
    /// A client that has done nothing yet.
    ///
    /// # Errors
    /// [`BridgeError::Unusable`] if the options cannot be used.
    pub fn new(options: Options, lender: Arc<L>) -> Result<Self, BridgeError> {
        Ok(BridgeClient {
            lender,
            proxy: Proxy::new(options)?,
            tasks: TaskTracker::new(),
            told: Mutex::default(),
            state: watch::Sender::new(State::Connecting),
            reconnect: Notify::new(),
        })
    }

    /// How the bridge is, now and whenever it changes.
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Opens another socket in place of the one that there is, or makes the next attempt at once. Calls go on.
    pub fn reconnect(&self) {
        self.reconnect.notify_one();
    }

    /// Lends until `stop`, telling `on_session` of each session that is registered.
    ///
    /// # Errors
    /// [`BridgeError`] if it cannot go on.
    pub async fn run(&self, mut on_session: impl FnMut(&Session), stop: &CancellationToken) -> Result<(), BridgeError> {
        let mut backoff = Backoff::default();
        let mut is_replacement = false;
        let ended = loop {
            let tools = self.lender.tools().borrow().clone();
            let session = match stop.run_until_cancelled(self.proxy.register(tools, is_replacement)).await {
                None => break Ok(()),
                Some(Ok(session)) => session,
                Some(Err(Failure::Final(error))) => break Err(error),
                Some(Err(Failure::Passing(why))) => {
                    if !self.wait(backoff.pause(), why, stop).await {
                        break Ok(());
                    }
                    continue;
                }
            };
            *self.told() = Told { confirmed: session.tools.clone(), sent: None };
            is_replacement = true;
            for warning in &session.warnings {
                tracing::warn!("the proxy warns: {warning}");
            }
            on_session(&session);
            let calls = Arc::new(Calls::new(&session.id, self.proxy.max_calls()));
            let ended = self.keep_connected(&session, &calls, &mut backoff, stop).await;
            calls.end();
            match ended {
                Ok(true) => {}
                Ok(false) => {
                    self.proxy.unregister(&session).await;
                    break Ok(());
                }
                Err(error) => break Err(error),
            }
        };
        self.tasks.close();
        let _still_running = tokio::time::timeout(WIND_DOWN, self.tasks.wait()).await;
        ended
    }

    /// Keeps a socket open for as long as the session lives: then true; false if it was told to stop.
    async fn keep_connected(
        &self,
        session: &Session,
        calls: &Arc<Calls>,
        backoff: &mut Backoff,
        stop: &CancellationToken,
    ) -> Result<bool, BridgeError> {
        loop {
            let (why, lasted, asked) = match stop.run_until_cancelled(self.proxy.connect(session)).await {
                None => return Ok(false),
                Some(Err(Failure::Final(error))) => return Err(error),
                Some(Err(Failure::Passing(why))) => (why, Duration::ZERO, None),
                Some(Ok(socket)) => {
                    let since = Instant::now();
                    tracing::info!(session.id = short(&session.id), "bridge connected");
                    calls.connected();
                    self.state.send_replace(State::Connected);
                    let end = self.serve(socket, calls, stop).await;
                    calls.disconnected();
                    let mut asked = None;
                    let why = match end {
                        End::Stopped => return Ok(false),
                        End::Reconnect => {
                            self.state.send_replace(State::Connecting);
                            continue;
                        }
                        End::Broken(why) => why,
                        End::Closed(code, reason) => {
                            match close_of(code) {
                                Some(Close::Deleted) => return Err(BridgeError::Deleted),
                                Some(Close::Unauthorized) => return Err(BridgeError::Unauthorized),
                                Some(Close::AlreadyConnected) => return Err(BridgeError::Occupied),
                                Some(Close::UnknownSession) => {
                                    tracing::warn!(
                                        session.id = short(&session.id),
                                        "the proxy does not know the session any more; registering again"
                                    );
                                    self.state.send_replace(State::Unregistered);
                                    // Not at once, should the proxy forget every session at once.
                                    let pause = backoff.pause();
                                    return Ok(stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some());
                                }
                                _ => {}
                            }
                            if code == u16::from(CloseCode::Size) {
                                calls.give_up_largest();
                            }
                            asked = protocol::retry_of(&reason);
                            format!("the proxy closed the bridge ({code}): {reason}")
                        }
                    };
                    (why, since.elapsed(), asked)
                }
            };
            backoff.worked(lasted);
            let pause = asked.map_or_else(|| backoff.pause(), Backoff::asked);
            if !self.wait(pause, why, stop).await {
                return Ok(false);
            }
        }
    }

    /// Reads and writes at the same time, for as long as the socket lives.
    async fn serve(&self, socket: Socket, calls: &Arc<Calls>, stop: &CancellationToken) -> End {
        let (mut sink, mut stream) = socket.split();
        let mut tools = self.lender.tools();
        // Whether an update that an earlier socket sent has arrived is not known.
        self.told().sent = None;
        let mut ping = tokio::time::interval(PING_INTERVAL);
        ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let write = async {
            loop {
                if let Some(update) = self.update(&mut tools, calls) {
                    calls.send(update);
                }
                let message = tokio::select! {
                    frame = calls.next_frame() => Message::Text(frame),
                    _ = ping.tick() => Message::Ping(Bytes::new()),
                    Ok(()) = tools.changed() => continue,
                };
                match tokio::time::timeout(SEND_TIMEOUT, sink.send(message)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the proxy takes nothing any more".into(),
                }
            }
        };
        let read = async {
            let mut has_greeted = false;
            loop {
                match tokio::time::timeout(SILENCE, stream.next()).await {
                    Ok(Some(Ok(Message::Text(text)))) => self.receive(&text, calls, &mut has_greeted),
                    Ok(Some(Ok(Message::Close(Some(close))))) => {
                        return End::Closed(close.code.into(), close.reason.to_string());
                    }
                    Ok(Some(Ok(Message::Close(None)))) => return End::Closed(1005, "it gives no reason".into()),
                    Ok(Some(Ok(_))) => {}
                    Ok(Some(Err(error))) => return End::Broken(error.to_string()),
                    Ok(None) => return End::Broken("the connection ended".into()),
                    Err(_) => return End::Broken("the proxy has been silent for too long".into()),
                }
            }
        };
        tokio::pin!(read);
        let end = tokio::select! {
            end = &mut read => end,
            // A socket that the proxy has closed takes no frames; why it did stands before the end.
            why = write => tokio::time::timeout(LAST_WORDS, read).await.unwrap_or(End::Broken(why)),
            () = stop.cancelled() => End::Stopped,
            () = self.reconnect.notified() => End::Reconnect,
        };
        if matches!(end, End::Stopped | End::Reconnect) {
            let _gone = tokio::time::timeout(LAST_WORDS, sink.close()).await;
        }
        end
    }

    /// The frame that tells the proxy of tools that it does not know yet.
    fn update(&self, tools: &mut watch::Receiver<Arc<str>>, calls: &Calls) -> Option<String> {
        let current = tools.borrow_and_update().clone();
        let mut told = self.told();
        if *told.sent.as_ref().unwrap_or(&told.confirmed) == current {
            return None;
        }
        told.sent = Some(current.clone());
        Some(frames::update_tools(calls.session(), &current))
    }

    fn receive(&self, text: &str, calls: &Arc<Calls>, has_greeted: &mut bool) {
        match FromProxy::parse(text) {
            Ok(FromProxy::Ping) => calls.send(PONG.into()),
            Ok(FromProxy::Hello { pending }) => {
                *has_greeted = true;
                calls.hello(&pending);
            }
            Ok(FromProxy::Invoke(invoke)) => {
                if !std::mem::replace(has_greeted, true) {
                    // A proxy that does not greet does not resume either.
                    calls.hello(&[]);
                }
                if let Some(started) = calls.start(&invoke, Instant::now()) {
                    self.spawn_call(&invoke, started, calls);
                }
            }
            Ok(FromProxy::Cancel { request_id, reason }) => {
                tracing::debug!(request.id = %request_id, %reason, "call cancelled");
                calls.cancel(&request_id);
            }
            Ok(FromProxy::ToolsUpdated) => {
                let mut told = self.told();
                if let Some(sent) = told.sent.take() {
                    told.confirmed = sent;
                }
                tracing::info!("the proxy has taken the changed tools");
            }
            Ok(FromProxy::Error(message)) => tracing::warn!("the proxy says: {message}"),
            Ok(FromProxy::Other) => {}
            Err(why) => tracing::warn!("{why}"),
        }
    }

    fn spawn_call(&self, invoke: &Invoke<'_>, started: Started, calls: &Arc<Calls>) {
        let own = |text: Option<&str>| text.map(str::to_owned);
        let call = ToolCall {
            tool: invoke.tool.clone().into_owned(),
            arguments: invoke.arguments.to_owned(),
            meta: own(invoke.meta),
            input_responses: own(invoke.input_responses),
            request_state: own(invoke.request_state),
        };
        let progress = ProgressSink { calls: Arc::clone(calls), number: started.number, is_wanted: invoke.progress };
        let running = Running { calls: Arc::clone(calls), number: started.number };
        let lender = Arc::clone(&self.lender);
        self.tasks.spawn(async move {
            let since = Instant::now();
            let tool = call.tool.clone();
            let answer = run_call(&*lender, call, progress, &started).await;
            let duration_ms = since.elapsed().as_millis() as u64;
            tracing::debug!(tool.name = tool, call = started.number, duration_ms, "call ended");
            running.calls.finish(running.number, &answer, Instant::now());
        });
    }

    /// Waits before the next attempt; false if it was told to stop.
    async fn wait(&self, pause: Duration, why: String, stop: &CancellationToken) -> bool {
        tracing::warn!(pause_ms = pause.as_millis() as u64, "{why}; trying again");
        self.state.send_replace(State::Waiting(why));
        let may_go_on = tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.reconnect.notified() => true,
            () = stop.cancelled() => false,
        };
        self.state.send_replace(State::Connecting);
        may_go_on
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that has no answer yet. If its task ends without one, because the tool panicked, the caller hears of it.
struct Running {
    calls: Arc<Calls>,
    number: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Does nothing if the call is finished.
        self.calls.finish(self.number, &Answer::Failed("The tool crashed.".into()), Instant::now());
    }
}

async fn run_call<L: Lender>(lender: &L, call: ToolCall, progress: ProgressSink, started: &Started) -> Answer {
    let give_up = started.cancelled.child_token();
    let time_is_over = async {
        match started.deadline {
            Some(deadline) => tokio::time::sleep_until((deadline + DEADLINE_SLACK).into()).await,
            None => std::future::pending().await,
        }
    };
    let work = lender.call(call, progress, give_up.clone());
    tokio::pin!(work);
    tokio::select! {
        answer = &mut work => return answer,
        () = started.cancelled.cancelled() => {}
        () = time_is_over => give_up.cancel(),
    }
    let _late = tokio::time::timeout(WIND_DOWN, work).await;
    Answer::Failed("The tool did not answer in time.".into())
}

/// What a close code means for an app; `None` for those after which it simply comes back.
fn close_of(code: u16) -> Option<Close> {
    [Close::Deleted, Close::Unauthorized, Close::UnknownSession, Close::AlreadyConnected]
        .into_iter()
        .find(|close| close.code() == code)
}

/// Enough of a session's id to follow it through a log, too little to use it.
fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
