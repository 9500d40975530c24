//! The app's end of a bridge, as the examination needs it: it does nothing by itself but answer pings, and tells of all
//! that comes.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::StatusCode;
use http::header::SEC_WEBSOCKET_PROTOCOL;
use tokio_tungstenite::tungstenite::Message;

use super::explain::{quote, sentence, silence, unexpected};
use super::finding::{Check, Finding};
use super::register::Session;
use super::wire::{Answer, Socket, Upgrade, Wire, WireError};
use super::{Options, fixes};
use crate::auth::Token;
use crate::node::bridge_client::frames::{FromProxy, PONG};
use crate::protocol::{BEARER_SUBPROTOCOL_PREFIX, BRIDGE_SUBPROTOCOL, Close, SessionId};

/// How long a frame may take to be sent.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a bridge that is refused may take to say so. The proxy does it at once.
const REFUSAL: Duration = Duration::from_millis(500);

/// What comes over a bridge.
#[derive(Debug)]
pub(super) enum Heard {
    Invoked {
        request_id: String,
        arguments: String,
    },
    Cancelled {
        request_id: String,
        reason: String,
    },
    /// The bridge has ended, and how.
    Ended(String),
}

/// A connected bridge.
pub(super) struct Bridge {
    session: Session,
    socket: Box<Socket>,
}

impl Bridge {
    /// Connects the bridge of a session.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) async fn connect(wire: &Wire, options: &Options, session: &Session) -> Result<Self, Finding> {
        let path = format!("{}/bridge", session.path());
        let socket = match wire.upgrade(&path, &options.app_token, &session.headers()).await {
            Ok(Upgrade::Done(socket)) => socket,
            Ok(Upgrade::Forged) => {
                let message =
                    "Somebody on the way answers the bridge's upgrade on his own: the key in the answer does not fit.";
                return Err(Finding::problem(Check::Websocket, message, fixes::upgrade()));
            }
            Ok(Upgrade::Refused(answer)) => return Err(refused(wire, &answer)),
            Err(WireError::Slow(limit)) => {
                let message =
                    format!("The bridge's upgrade is not answered within {limit:?}: the front does not forward it.");
                return Err(Finding::problem(Check::Websocket, message, fixes::upgrade()));
            }
            Err(error) => return Err(silence(Check::Websocket, "the bridge's upgrade", &error)),
        };
        let mut bridge = Bridge { session: session.clone(), socket };
        match tokio::time::timeout(REFUSAL, bridge.heard()).await {
            Err(_) => Ok(bridge),
            Ok(Heard::Ended(why)) => {
                let message = format!("The bridge opens and is closed at once: {why}.");
                let is_token = why.contains(&Close::Unauthorized.code().to_string());
                let fixes = if is_token { fixes::authorization() } else { fixes::upgrade() };
                Err(Finding::problem(Check::Websocket, message, fixes))
            }
            Ok(other) => {
                let message = format!("The bridge begins with a frame that nobody asked for: {other:?}.");
                Err(Finding::problem(Check::Websocket, message, Vec::new()))
            }
        }
    }

    /// The next thing that matters. Pings are answered.
    pub(super) async fn heard(&mut self) -> Heard {
        loop {
            let message = match self.socket.next().await {
                Some(Ok(message)) => message,
                Some(Err(error)) => return Heard::Ended(format!("the connection breaks ({error})")),
                None => return Heard::Ended("the connection is closed without a word".into()),
            };
            let text = match message {
                Message::Text(text) => text,
                Message::Close(Some(close)) => {
                    return Heard::Ended(format!("code {}, {}", u16::from(close.code), quote(&close.reason)));
                }
                Message::Close(None) => return Heard::Ended("it is closed without a code".into()),
                _ => continue,
            };
            match FromProxy::parse(&text) {
                Ok(FromProxy::Ping) => self.send(PONG.to_owned()).await,
                Ok(FromProxy::Invoke(invoke)) => {
                    return Heard::Invoked {
                        request_id: invoke.request_id.into_owned(),
                        arguments: invoke.arguments.to_owned(),
                    };
                }
                Ok(FromProxy::Cancel { request_id, reason }) => {
                    return Heard::Cancelled { request_id: request_id.into_owned(), reason: reason.into_owned() };
                }
                _ => {}
            }
        }
    }

    async fn send(&mut self, message: impl Into<Message>) {
        // If it does not get through, the next thing that is heard says why.
        let _lost = tokio::time::timeout(SEND_TIMEOUT, self.socket.send(message.into())).await;
    }

    /// Makes something happen on the bridge, in both directions.
    pub(super) async fn ping(&mut self) {
        self.send(Message::Ping(Bytes::new())).await;
    }

    /// Answers a call; `members` is the rest of the frame, as text.
    pub(super) async fn answer(&mut self, request_id: &str, members: &str) {
        let id = &self.session.id;
        let frame =
            format!(r#"{{"type":"invoke_result","mcpSessionId":"{id}","request_id":"{request_id}",{members}}}"#);
        self.send(frame).await;
    }

    /// Tells how far a call is.
    pub(super) async fn progress(&mut self, request_id: &str, progress: u32) {
        let id = &self.session.id;
        let frame = format!(
            r#"{{"type":"tool_progress","mcpSessionId":"{id}","request_id":"{request_id}","progress":{progress}}}"#
        );
        self.send(frame).await;
    }
}

/// An upgrade that is answered by something else than 101.
fn refused(wire: &Wire, answer: &Answer) -> Finding {
    let says = sentence(answer).unwrap_or_default();
    let problem = |message: String, fixes| Finding::problem(Check::Websocket, message, fixes);
    if answer.status == StatusCode::UPGRADE_REQUIRED && !says.is_empty() {
        let message = "The bridge's upgrade arrives without Upgrade and Connection: the front does not forward them.";
        return problem(message.into(), fixes::upgrade());
    }
    if says.starts_with("A WebSocket begins with") {
        let message = "The front speaks HTTP/1.0 to the proxy, with which there is no upgrade.";
        return problem(message.into(), fixes::upgrade());
    }
    if says.starts_with("Sec-WebSocket-") {
        return problem(format!("The bridge's upgrade loses headers on the way: {}", quote(&says)), fixes::upgrade());
    }
    if says.is_empty() && !answer.status.is_redirection() && answer.status != StatusCode::NOT_FOUND {
        let message = format!(
            "The bridge's upgrade is answered with {} instead of 101: the front does not forward it.",
            answer.status
        );
        return problem(message, fixes::upgrade());
    }
    unexpected(&wire.base, Check::Websocket, "the bridge's upgrade", answer)
}

/// A browser can set no headers; its token is a subprotocol. An unknown session tells whether it arrives.
pub(super) async fn browser(wire: &Wire, options: &Options) -> Finding {
    let check = Check::BrowserBridge;
    if options.app_token.is_empty() {
        return Finding::ok(check, "No token is needed.");
    }
    let token = URL_SAFE_NO_PAD.encode(options.app_token.expose());
    let offer = format!("{BRIDGE_SUBPROTOCOL}, {BEARER_SUBPROTOCOL_PREFIX}{token}");
    let path = format!("/v1/chat/sessions/{}/bridge", SessionId::random());
    let socket = match wire.upgrade(&path, &Token::default(), &[(SEC_WEBSOCKET_PROTOCOL, offer)]).await {
        Ok(Upgrade::Done(socket)) => socket,
        Ok(Upgrade::Refused(answer)) => return refused(wire, &answer),
        Ok(Upgrade::Forged) => return Finding::problem(check, "The upgrade's key does not fit.", fixes::upgrade()),
        Err(error) => return silence(check, "a browser's bridge", &error),
    };
    let nobody = Session::nobody();
    let mut bridge = Bridge { session: nobody, socket };
    match tokio::time::timeout(super::wire::ANSWER_TIMEOUT, bridge.heard()).await {
        Ok(Heard::Ended(why)) if why.contains(&Close::UnknownSession.code().to_string()) => {
            Finding::ok(check, "The token of a browser, a subprotocol, arrives.")
        }
        _ => {
            let message =
                "The token of a browser's bridge does not arrive: the front takes Sec-WebSocket-Protocol away.";
            Finding::problem(check, message, fixes::subprotocol())
        }
    }
}
