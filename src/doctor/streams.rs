//! What takes time: events while a call runs, a client that goes, a bridge and a call about which nothing is heard.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use http_body_util::BodyExt;

use super::app::{Bridge, Heard};
use super::calls::{client, modern, rpc};
use super::explain::{quote, silence, unexpected};
use super::finding::{Check, Finding};
use super::register::Session;
use super::wire::{Begun, Wire, WireError, within};
use super::{Options, fixes};

/// How long an event may be under way.
const EVENT: Duration = Duration::from_secs(4);
/// How long a call may take to arrive at the app.
const ARRIVAL: Duration = Duration::from_secs(15);
/// How much longer than asked a long call may take.
const MARGIN: Duration = Duration::from_secs(15);

/// How often something happens on the bridge of a long call: a bridge that is silent is another matter.
const POKE: Duration = Duration::from_millis(500);

/// The next call that arrives at the app.
async fn invoked(bridge: &mut Bridge) -> Result<String, String> {
    let arrival = async {
        loop {
            match bridge.heard().await {
                Heard::Invoked { request_id, .. } => return Ok(request_id),
                Heard::Cancelled { .. } => {}
                Heard::Ended(why) => return Err(why),
            }
        }
    };
    tokio::time::timeout(ARRIVAL, arrival).await.unwrap_or_else(|_| Err("the call does not arrive".into()))
}

/// Waits at the app for a call, while something goes on at the client that keeps it alive.
async fn until_invoked<T>(
    going_on: std::pin::Pin<&mut impl Future<Output = Result<T, WireError>>>,
    bridge: &mut Bridge,
) -> Result<String, String> {
    tokio::select! {
        biased;
        arrived = invoked(bridge) => arrived,
        ended = going_on => Err(match ended {
            Ok(_) => "it is answered before the app has".into(),
            Err(error) => error.to_string(),
        }),
    }
}

const PROGRESS_PARAMS: &str = r#"{"name":"doctor_wait","arguments":{},"_meta":{"progressToken":1}}"#;

/// An event that the app sends must arrive before the call ends. Clients take compressed answers, so this one does.
pub(super) async fn streaming(wire: &Wire, options: &Options, session: &Session, bridge: &mut Bridge) -> Finding {
    let check = Check::Streaming;
    let request = client(wire, options, &session.mcp_path()).header(ACCEPT_ENCODING, "gzip, deflate, br");
    let begin = wire.begin(request, rpc("tools/call", PROGRESS_PARAMS));
    tokio::pin!(begin);
    let id = match until_invoked(begin.as_mut(), bridge).await {
        Ok(id) => id,
        Err(why) => return Finding::problem(check, format!("A call with progress fails: {why}."), Vec::new()),
    };
    let mut encoding = None;
    let first = async {
        bridge.progress(&id, 1).await;
        let mut begun = begin.as_mut().await?;
        encoding = begun
            .response
            .headers()
            .get(CONTENT_ENCODING)
            .map(|value| quote(&String::from_utf8_lossy(value.as_bytes())));
        // A second one: the first is also what the stream begins with.
        bridge.progress(&id, 2).await;
        let is_plain = encoding.is_none();
        let mut seen = Vec::new();
        loop {
            let piece = next(&mut begun).await?;
            let Some(piece) = piece else { return Ok(None) };
            seen.extend_from_slice(&piece);
            let text = String::from_utf8_lossy(&seen);
            // What is compressed cannot be read here; any piece beside the coding's own header is an event.
            if text.contains(r#""progress":2"#) || (!is_plain && seen.len() > 32) {
                return Ok(Some(begun));
            }
        }
    };
    let outcome = within(EVENT, first).await;
    bridge.answer(&id, r#""ok":true,"content":{}"#).await;
    let coded = encoding.is_some();
    match outcome {
        Ok(Some(begun)) => {
            let ended = within(EVENT, async { begun.finish().await }).await;
            match ended {
                Err(error) => silence(check, "the end of an event stream", &error),
                Ok(_) if coded => {
                    let message =
                        "Event streams are compressed on the way; some clients then see events late, or not at all.";
                    Finding::warning(check, message, fixes::compression())
                }
                Ok(_) => Finding::ok(check, "Events arrive while the call runs."),
            }
        }
        Ok(None) => Finding::problem(check, "The event stream ends before the call does.", fixes::streaming()),
        Err(WireError::Slow(_)) => {
            let message = format!(
                "Events do not arrive while the call runs: the front holds the answer back{}.",
                if coded { " to compress it" } else { "" }
            );
            Finding::problem(check, message, fixes::streaming())
        }
        Err(error) => silence(check, "a call with progress", &error),
    }
}

async fn next(begun: &mut Begun) -> Result<Option<Bytes>, WireError> {
    loop {
        match begun.response.body_mut().frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Some(Err(error)) => return Err(WireError::Broken(error.to_string())),
            None => return Ok(None),
        }
    }
}

/// The app must hear that a client has gone, before its answer has begun and after.
pub(super) async fn cancel(wire: &Wire, options: &Options, session: &Session, bridge: &mut Bridge) -> Finding {
    let check = Check::Cancel;
    for streams in [false, true] {
        // A client of 2026-07-28, whose going is a cancellation whatever the settings say.
        let (request, body) = modern(wire, options, session, "doctor_wait", "{}");
        let mut begin = Box::pin(wire.begin(request, body));
        let id = match until_invoked(begin.as_mut(), bridge).await {
            Ok(id) => id,
            Err(why) => return Finding::problem(check, format!("A call fails: {why}."), Vec::new()),
        };
        let mut begun = None;
        if streams {
            bridge.progress(&id, 1).await;
            begun = within(EVENT, begin.as_mut()).await.ok();
        }
        drop((begin, begun));
        let heard = tokio::time::timeout(EVENT, async {
            loop {
                match bridge.heard().await {
                    Heard::Cancelled { request_id, reason } if request_id == id => return Ok(reason),
                    Heard::Ended(why) => return Err(why),
                    _ => {}
                }
            }
        });
        match heard.await {
            Ok(Ok(_)) => {}
            Ok(Err(why)) => return Finding::problem(check, format!("The bridge ends meanwhile: {why}."), Vec::new()),
            Err(_) => {
                bridge.answer(&id, r#""ok":true,"content":{}"#).await;
                let when = if streams { "after its answer has begun" } else { "before its answer has begun" };
                let message = format!(
                    "The app does not hear that a client has gone ({when}): its call runs on for nobody. The front does not pass it on."
                );
                return Finding::problem(check, message, fixes::cancel());
            }
        }
    }
    Finding::ok(check, "The app hears of a client that has gone.")
}

/// A bridge on which nothing happens must stay open, and still work then.
pub(super) async fn idle_bridge(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let check = Check::IdleBridge;
    let since = Instant::now();
    let mut bridge = match Bridge::connect(wire, options, session).await {
        Ok(bridge) => bridge,
        Err(finding) => return finding,
    };
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    match tokio::time::timeout(options.idle, bridge.heard()).await {
        Err(_) => {}
        Ok(Heard::Ended(why)) => {
            let message = format!(
                "A silent bridge is closed after {}: {why}. The front's timeout is shorter than the proxy's ping.",
                seconds(since.elapsed())
            );
            return Finding::problem(check, message, fixes::idle());
        }
        Ok(_) => return Finding::problem(check, "A call comes that nobody made.", Vec::new()),
    }
    let request = client(wire, options, &session.mcp_path());
    let begin = wire.begin(request, rpc("tools/call", r#"{"name":"doctor_wait","arguments":{}}"#));
    tokio::pin!(begin);
    match until_invoked(begin.as_mut(), &mut bridge).await {
        Ok(id) => {
            bridge.answer(&id, r#""ok":true,"content":{}"#).await;
            let _answered = within(EVENT, begin).await;
            Finding::ok(check, format!("A bridge stays open through {} of silence.", seconds(options.idle)))
        }
        Err(why) => {
            let message = format!("After {} of silence nothing gets through to the app: {why}.", seconds(options.idle));
            Finding::problem(check, message, fixes::idle())
        }
    }
}

/// A call that takes long, of a client that takes no event stream, must not be cut.
pub(super) async fn long_call(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let check = Check::LongCall;
    let mut bridge = match Bridge::connect(wire, options, session).await {
        Ok(bridge) => bridge,
        Err(finding) => return finding,
    };
    let request =
        wire.post(&session.mcp_path(), &options.openclaw_token).header(http::header::ACCEPT, "application/json");
    let since = Instant::now();
    let call = within(options.idle + MARGIN + ARRIVAL, async {
        wire.begin(request, rpc("tools/call", r#"{"name":"doctor_wait","arguments":{}}"#)).await?.finish().await
    });
    tokio::pin!(call);
    let id = match until_invoked(call.as_mut(), &mut bridge).await {
        Ok(id) => id,
        Err(why) => return Finding::problem(check, format!("A call fails: {why}."), Vec::new()),
    };
    let pause = tokio::time::sleep(options.idle);
    tokio::pin!(pause);
    let mut is_answered = false;
    let mut pokes = tokio::time::interval(POKE);
    let answer = loop {
        tokio::select! {
            answer = &mut call => break answer,
            () = &mut pause, if !is_answered => {
                is_answered = true;
                bridge.answer(&id, r#""ok":true,"content":"late""#).await;
            }
            _ = pokes.tick() => bridge.ping().await,
            heard = bridge.heard() => if let Heard::Ended(why) = heard {
                let message = format!(
                    "A bridge is closed after {:.1} s, though it was in use: {why}.",
                    since.elapsed().as_secs_f64()
                );
                return Finding::problem(Check::IdleBridge, message, fixes::idle());
            },
        }
    };
    let cut = |how: &str| {
        let message = format!(
            "A call that takes long is cut after {:.1} s: {how}. A tool may take OPENCLAW_PROXY_TOOL_TIMEOUT_SECONDS.",
            since.elapsed().as_secs_f64()
        );
        Finding::problem(check, message, fixes::long_call())
    };
    match answer {
        Ok(answer) if answer.text().contains("late") => {
            Finding::ok(check, format!("A call may take {:.1} s.", options.idle.as_secs_f64()))
        }
        Ok(answer) if answer.status == 504 || answer.status == 502 => cut(answer.status.as_str()),
        Ok(answer) if answer.status == 200 => cut(&quote(&answer.text())),
        Ok(answer) => unexpected(&wire.base, check, "a long call", &answer),
        Err(error) => cut(&error.to_string()),
    }
}
