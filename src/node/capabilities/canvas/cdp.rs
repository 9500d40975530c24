//! The DevTools protocol's frames, over a browser's pipes or its WebSocket.
//!
//! Sending and receiving can both be abandoned half-way, at a deadline or a cancellation, without harm to the
//! connection: what was begun is kept by the framing and goes on with the next frame.

use std::io;
use std::pin::Pin;

use futures_util::{Sink, SinkExt, Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::{ChildStdin, ChildStdout};
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error, Message as Frame};
use tokio_util::codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead, FramedWrite};

/// The largest frame, which holds a picture of the largest canvas.
const MAX_FRAME_BYTES: usize = 64 << 20;

/// A connection to a browser.
pub(super) struct Connection {
    outgoing: Pin<Box<dyn Sink<String, Error = io::Error> + Send>>,
    incoming: Pin<Box<dyn Stream<Item = io::Result<Message>> + Send>>,
    last_id: u64,
}

/// What a browser says: an answer, which has an id, or an event, which has a method.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Message {
    /// Which command it answers.
    pub(super) id: Option<u64>,
    /// The page that it is about; none, if it is about the browser.
    pub(super) session_id: Option<String>,
    /// The event.
    #[serde(default)]
    pub(super) method: String,
    /// The event's parameters.
    #[serde(default)]
    pub(super) params: Value,
    /// What came of the command; nothing, if it was refused.
    pub(super) result: Option<Value>,
}

impl Connection {
    /// Over the pipes of a browser that was started with `--remote-debugging-pipe`.
    pub(super) fn over_pipes(stdin: ChildStdin, stdout: ChildStdout) -> Self {
        let codec = || AnyDelimiterCodec::new_with_max_length(vec![0], vec![0], MAX_FRAME_BYTES);
        let broken = |error| match error {
            AnyDelimiterCodecError::Io(error) => error,
            too_long => io::Error::new(io::ErrorKind::InvalidData, too_long),
        };
        let outgoing = SinkExt::<String>::sink_map_err(FramedWrite::new(stdin, codec()), broken);
        let incoming = FramedRead::new(stdout, codec()).map(move |frame| parse(&frame.map_err(broken)?));
        Connection { outgoing: Box::pin(outgoing), incoming: Box::pin(incoming), last_id: 0 }
    }

    /// Over the WebSocket of a browser that listens on this port of this machine.
    pub(super) async fn over_socket(port: u16, path: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let config =
            WebSocketConfig::default().max_message_size(Some(MAX_FRAME_BYTES)).max_frame_size(Some(MAX_FRAME_BYTES));
        let url = format!("ws://127.0.0.1:{port}{path}");
        let (socket, _) = client_async_with_config(url, stream, Some(config)).await.map_err(broken_socket)?;
        let (outgoing, incoming) = socket.split();
        let outgoing = outgoing.sink_map_err(broken_socket).with(async |text: String| Ok(Frame::text(text)));
        let incoming = incoming.filter_map(async |frame| match frame {
            Ok(Frame::Text(text)) => Some(parse(text.as_bytes())),
            Ok(_) => None,
            Err(error) => Some(Err(broken_socket(error))),
        });
        Ok(Connection { outgoing: Box::pin(outgoing), incoming: Box::pin(incoming), last_id: 0 })
    }

    /// Sends a command, to a page if `session` names one, and tells its id.
    pub(super) async fn send(&mut self, session: Option<&str>, method: &str, params: Value) -> io::Result<u64> {
        self.last_id += 1;
        let mut command = json!({ "id": self.last_id, "method": method, "params": params });
        if let Some(session) = session {
            command["sessionId"] = session.into();
        }
        self.outgoing.send(command.to_string()).await?;
        Ok(self.last_id)
    }

    /// The next message.
    pub(super) async fn next(&mut self) -> io::Result<Message> {
        self.incoming.next().await.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
    }
}

fn parse(text: &[u8]) -> io::Result<Message> {
    Ok(serde_json::from_slice(text)?)
}

fn broken_socket(error: Error) -> io::Error {
    io::Error::other(error)
}
