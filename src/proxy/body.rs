//! Reading a request's body within its bounds: size, pauses, time in all, and what all requests keep in memory
//! together. And a response's body that is sent from where its parts are kept.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::StatusCode;
use http::header::CONTENT_LENGTH;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::time::error::Elapsed;

use crate::proxy::ProxyState;
use crate::proxy::config::Config;
use crate::proxy::gate::Refusal;
use crate::proxy::memory::{NoRoom, Share};
use crate::proxy::metrics::Limit;
use crate::proxy::tenants::Tenant;

/// How much of a body over the limit is still read, in limits, so that its sender gets to read the answer.
const DISCARDED_LIMITS: usize = 4;

/// A request's whole body, and its share of the memory.
#[derive(Debug)]
pub struct Held {
    bytes: Bytes,
    _share: Share,
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl From<NoRoom> for Refusal {
    fn from(no_room: NoRoom) -> Self {
        let status = match no_room {
            NoRoom::Tenant(_) => StatusCode::TOO_MANY_REQUESTS,
            NoRoom::Everybody(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        Refusal { status, message: no_room.to_string() }
    }
}

/// Reads the whole body of a tenant's request. One that arrived in a single piece is not copied. A stranger's counts
/// for everybody alone.
///
/// # Errors
/// [`Refusal`] with 413 (too large), 408 (too slow), 400 (broken off), 429 or 503 (no room).
pub async fn read<B: Body<Data = Bytes> + Unpin>(
    headers: &HeaderMap,
    mut body: B,
    state: &ProxyState,
    tenant: Option<&Arc<Tenant>>,
) -> Result<Held, Refusal> {
    let config = &state.config;
    let limit = config.max_body_bytes;
    let mut clock = Clock::new(config);
    let mut share = Share::new(tenant, &state.request_bytes);
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    let mut size = 0;
    // Set once the body is only read on so that its sender gets to read this answer.
    let mut refusal = None;
    let too_large = |size: usize| {
        state.records.limit(Limit::BodyBytes);
        let message = format!("The body has {size} bytes or more; the limit is {limit}.");
        Refusal { status: StatusCode::PAYLOAD_TOO_LARGE, message }
    };
    loop {
        let frame = match clock.next_frame(&mut body).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) | Err(_) if size > limit => return Err(too_large(size)),
            Ok(None) => match refusal {
                Some(refusal) => return Err(refusal),
                None if rest.is_empty() => return Ok(Held { bytes: first, _share: share }),
                None => return Ok(Held { bytes: rest.freeze(), _share: share }),
            },
            Ok(Some(Err(_))) => {
                return Err(Refusal { status: StatusCode::BAD_REQUEST, message: "The body broke off.".into() });
            }
            Err(_) => {
                let message = "The body came too slowly.".into();
                return Err(Refusal { status: StatusCode::REQUEST_TIMEOUT, message });
            }
        };
        let Ok(data) = frame.into_data() else { continue };
        size += data.len();
        if size > limit.saturating_mul(DISCARDED_LIMITS) {
            return Err(too_large(size));
        }
        if refusal.is_none() && size <= limit {
            let no_room = share.grow_to(size).err();
            refusal = no_room.inspect(|no_room| state.records.limit(no_room.limit())).map(Refusal::from);
        }
        if refusal.is_some() || size > limit {
            (first, rest) = (Bytes::new(), BytesMut::new());
            share.release();
        } else if size == data.len() {
            first = data;
        } else {
            if rest.is_empty() {
                let declared = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
                rest.reserve(declared.unwrap_or(0).min(limit).max(size));
                rest.extend_from_slice(&first);
            }
            rest.extend_from_slice(&data);
        }
    }
}

/// Reads the body of a request that is refused, and throws it away. A sender that is cut off while it writes loses
/// the answer, and a reverse proxy in between makes a 502 of it.
pub async fn discard<B: Body<Data = Bytes> + Unpin>(mut body: B, config: &Config) {
    let mut clock = Clock::new(config);
    let most = config.max_body_bytes.saturating_mul(DISCARDED_LIMITS);
    let mut size = 0;
    while size <= most {
        match clock.next_frame(&mut body).await {
            Ok(Some(Ok(frame))) => size += frame.data_ref().map_or(0, Bytes::len),
            _ => return,
        }
    }
}

/// How long a body may pause, and take in all. It starts with the first wait: most bodies are there at once, and need
/// none.
struct Clock {
    idle: Duration,
    timeout: Duration,
    end: Option<Instant>,
}

impl Clock {
    fn new(config: &Config) -> Self {
        Clock { idle: config.body_idle.0, timeout: config.body_timeout.0, end: None }
    }

    async fn next_frame<B: Body + Unpin>(
        &mut self,
        body: &mut B,
    ) -> Result<Option<Result<Frame<B::Data>, B::Error>>, Elapsed> {
        let mut frame = body.frame();
        if let Poll::Ready(frame) = poll_fn(|cx| Poll::Ready(Pin::new(&mut frame).poll(cx))).await {
            return Ok(frame);
        }
        let now = Instant::now();
        let end = *self.end.get_or_insert(now + self.timeout);
        tokio::time::timeout_at((now + self.idle).min(end).into(), frame).await
    }
}

/// A body of some pieces that are kept elsewhere, too, and not copied.
#[derive(Debug)]
pub struct Pieces {
    pieces: std::vec::IntoIter<Bytes>,
}

impl<P: Into<Vec<Bytes>>> From<P> for Pieces {
    fn from(pieces: P) -> Self {
        Pieces { pieces: pieces.into().into_iter() }
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.pieces.next().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.as_slice().is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let bytes: usize = self.pieces.as_slice().iter().map(Bytes::len).sum();
        SizeHint::with_exact(bytes as u64)
    }
}
