//! The one page of a browser: what is shown in it, and asking it things.
//!
//! What it shows is not trusted. A dialog is dismissed, a download or another window is refused, and every command has
//! a deadline; a page that does not answer any more is given up with its browser.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::browser::Browser;
use super::cdp::Message;
use super::{Format, Frame, Options, Picture, Trouble, browser};

/// How long a browser may take to start.
const START: Duration = Duration::from_secs(20);
/// How long an ordinary command may take.
const CALL: Duration = Duration::from_secs(10);
/// How long a server may take to begin its answer.
const NAVIGATION: Duration = Duration::from_secs(15);
/// How long a page may take to load all that belongs to it, before it is shown as it is.
const LOADING: Duration = Duration::from_secs(5);
/// How long a window may take to be there, or to be as it was told to be, before it can be told more.
const WINDOW: Duration = Duration::from_secs(5);
/// How often what has no event of its own is looked at.
const POLL: Duration = Duration::from_millis(20);
/// How long a page that was interrupted may take to answer.
const REVIVAL: Duration = Duration::from_millis(500);
/// The most reports of a page that wait to be read.
const MAX_REPORTS: usize = 256;
/// The world of our own scripts, which those of the page cannot see.
const WORLD: &str = "openclaw";
/// What our own scripts report with.
const BINDING: &str = "openclawReport";

/// A page, with the browser that shows it.
pub(super) struct Page {
    browser: Browser,
    target: String,
    session: String,
    is_headless: bool,
    is_loaded: bool,
    is_gone: bool,
    /// Our own world of what is shown, if that is a page of ours.
    world: Option<i64>,
    /// What our own scripts had to tell.
    reports: Vec<String>,
}

/// Whether a command is for the page or for its browser.
#[derive(Clone, Copy)]
enum To {
    Page,
    Browser,
}

impl Page {
    /// Starts a browser and opens its page.
    pub(super) async fn open(options: &Options) -> Result<Self, Trouble> {
        let program = browser::program(options).ok_or(Trouble::NotFound)?;
        let since = Instant::now();
        let page = match tokio::time::timeout(START, Self::start(&program, options)).await {
            Ok(Ok(page)) => page,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the canvas's browser cannot be used");
                return Err(Trouble::NotStarted);
            }
            Err(_) => {
                tracing::warn!("the canvas's browser does not start");
                return Err(Trouble::NotStarted);
            }
        };
        tracing::info!(
            duration_ms = since.elapsed().as_millis(),
            headless = page.is_headless,
            "the canvas's browser runs"
        );
        Ok(page)
    }

    async fn start(program: &std::path::Path, options: &Options) -> std::io::Result<Self> {
        let browser = Browser::start(program, options).await?;
        let is_headless = browser::is_headless(options);
        let mut page = Page {
            browser,
            target: String::new(),
            session: String::new(),
            is_headless,
            is_loaded: false,
            is_gone: false,
            world: None,
            reports: Vec::new(),
        };
        page.attach().await.map_err(std::io::Error::other)?;
        Ok(page)
    }

    /// Takes over the page that the browser has opened.
    async fn attach(&mut self) -> Result<(), Trouble> {
        self.target = loop {
            let targets = self.call(To::Browser, "Target.getTargets", json!({})).await?;
            let targets = targets["targetInfos"].as_array().map(Vec::as_slice).unwrap_or_default();
            if let Some(target) = targets.iter().find(|target| target["type"] == "page") {
                break text(&target["targetId"]);
            }
            tokio::time::sleep(POLL).await;
        };
        let attach = json!({ "targetId": self.target, "flatten": true });
        self.session = text(&self.call(To::Browser, "Target.attachToTarget", attach).await?["sessionId"]);
        self.call(To::Browser, "Target.setDiscoverTargets", json!({ "discover": true })).await?;
        self.call(To::Browser, "Browser.setDownloadBehavior", json!({ "behavior": "deny" })).await?;
        self.call(To::Page, "Page.enable", json!({})).await?;
        self.call(To::Page, "Inspector.enable", json!({})).await?;
        Ok(())
    }

    /// Ends the browser and waits until nothing of it is left.
    pub(super) async fn close(self) {
        self.browser.end().await;
    }

    /// Whether the browser or its page has ended.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// What our own scripts have told since the last time.
    pub(super) fn take_reports(&mut self) -> Vec<String> {
        std::mem::take(&mut self.reports)
    }

    /// Heeds the next event while there is nothing to ask.
    pub(super) async fn watch(&mut self) {
        match self.browser.connection.next().await {
            Ok(message) => self.heed(message).await,
            Err(_) => self.is_gone = true,
        }
    }

    async fn call(&mut self, to: To, method: &str, params: Value) -> Result<Value, Trouble> {
        self.call_within(CALL, to, method, params).await
    }

    /// Sends a command and waits for its answer; events that come in between are heeded.
    async fn call_within(&mut self, wait: Duration, to: To, method: &str, params: Value) -> Result<Value, Trouble> {
        let answered = async {
            let session = self.session.clone();
            let session = matches!(to, To::Page).then_some(&*session);
            let sent = self.browser.connection.send(session, method, params).await;
            let id = sent.map_err(|_| self.lost())?;
            while !self.is_gone {
                let message = self.browser.connection.next().await.map_err(|_| self.lost())?;
                if message.id == Some(id) {
                    return message.result.ok_or_else(|| {
                        tracing::debug!(method, "the browser refused");
                        Trouble::Refused
                    });
                }
                self.heed(message).await;
            }
            Err(Trouble::Gone)
        };
        tokio::time::timeout(wait, answered).await.unwrap_or_else(|_| {
            tracing::debug!(method, "the browser is late");
            Err(Trouble::Late)
        })
    }

    fn lost(&mut self) -> Trouble {
        self.is_gone = true;
        Trouble::Gone
    }

    /// Does what an event calls for. Answers to commands that were given up are none.
    async fn heed(&mut self, message: Message) {
        let Message { session_id, method, params, .. } = message;
        let is_ours = session_id.as_deref() == Some(&self.session);
        let reply = match &*method {
            "Page.javascriptDialogOpening" if is_ours => {
                // A page that asks whether it may be left is left.
                Some(("Page.handleJavaScriptDialog", json!({ "accept": params["type"] == "beforeunload" })))
            }
            "Target.targetCreated" => {
                let target = &params["targetInfo"];
                let is_other = target["type"] == "page" && target["targetId"] != *self.target;
                is_other.then(|| ("Target.closeTarget", json!({ "targetId": target["targetId"] })))
            }
            "Page.loadEventFired" if is_ours => {
                self.is_loaded = true;
                None
            }
            "Runtime.bindingCalled" if is_ours && params["executionContextId"].as_i64() == self.world => {
                if self.reports.len() < MAX_REPORTS {
                    self.reports.push(text(&params["payload"]));
                }
                None
            }
            "Inspector.targetCrashed" | "Inspector.detached" if is_ours => {
                self.is_gone = true;
                None
            }
            "Target.detachedFromTarget" if params["sessionId"] == *self.session => {
                self.is_gone = true;
                None
            }
            _ => None,
        };
        if let Some((method, params)) = reply {
            let session = self.session.clone();
            let session = method.starts_with("Page.").then_some(&*session);
            self.is_gone |= self.browser.connection.send(session, method, params).await.is_err();
        }
    }

    /// Makes it visible, at its place and of its size.
    pub(super) async fn present(&mut self, frame: &Frame) -> Result<(), Trouble> {
        let Frame { width, height, .. } = *frame;
        if self.is_headless {
            let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
            self.call(To::Page, "Emulation.setDeviceMetricsOverride", metrics).await?;
            return Ok(());
        }
        self.set_bounds(json!({ "windowState": "normal" })).await?;
        // The window is larger than the canvas by its frame.
        let measures = "[outerWidth - innerWidth, outerHeight - innerHeight, \
            screen.availLeft, screen.availTop, screen.availWidth, screen.availHeight]";
        let measured = self.ask(measures).await?;
        let measure = |index: usize| measured[index].as_i64().unwrap_or(0);
        let (outer_width, outer_height) = (i64::from(width) + measure(0), i64::from(height) + measure(1));
        let centre = |start: i64, available: i64, size: i64| start + ((available - size) / 2).max(0);
        let left = frame.x.map_or_else(|| centre(measure(2), measure(4), outer_width), i64::from);
        let top = frame.y.map_or_else(|| centre(measure(3), measure(5), outer_height), i64::from);
        let bounds = json!({ "left": left, "top": top, "width": outer_width, "height": outer_height });
        self.set_bounds(bounds).await?;
        self.call(To::Page, "Page.bringToFront", json!({})).await?;
        Ok(())
    }

    /// Takes its window away from the user's eyes.
    pub(super) async fn hide(&mut self) -> Result<(), Trouble> {
        if self.is_headless { Ok(()) } else { self.set_bounds(json!({ "windowState": "minimized" })).await }
    }

    /// A window that is not there yet, or that is being made smaller or larger, takes no bounds.
    async fn set_bounds(&mut self, bounds: Value) -> Result<(), Trouble> {
        let since = Instant::now();
        loop {
            match self.try_bounds(&bounds).await {
                Err(Trouble::Refused) if since.elapsed() < WINDOW => tokio::time::sleep(POLL).await,
                outcome => return outcome,
            }
        }
    }

    async fn try_bounds(&mut self, bounds: &Value) -> Result<(), Trouble> {
        let target = json!({ "targetId": self.target });
        let window = self.call(To::Browser, "Browser.getWindowForTarget", target).await?["windowId"].clone();
        let bounds = json!({ "windowId": window, "bounds": bounds });
        self.call(To::Browser, "Browser.setWindowBounds", bounds).await?;
        Ok(())
    }

    /// Shows what is at an address. `false` if that is nothing to show, such as a download.
    pub(super) async fn navigate(&mut self, url: &str) -> Result<bool, Trouble> {
        (self.world, self.is_loaded) = (None, false);
        let answer = self.call_within(NAVIGATION, To::Page, "Page.navigate", json!({ "url": url })).await?;
        match answer["errorText"].as_str() {
            Some("net::ERR_ABORTED") => return Ok(false),
            Some(_) => return Err(Trouble::Refused),
            None => {}
        }
        self.loaded().await?;
        Ok(true)
    }

    /// Shows a document, which has no origin and so reaches nothing that a foreign web page does not reach.
    pub(super) async fn show(&mut self, html: &str, title: &str) -> Result<(), Trouble> {
        self.navigate("about:blank").await?;
        self.is_loaded = false;
        let document = json!({ "frameId": self.target, "html": html });
        self.call(To::Page, "Page.setDocumentContent", document).await?;
        self.loaded().await?;
        self.ask(&format!("document.title ||= {}", Value::from(title))).await?;
        Ok(())
    }

    /// Waits until the page has loaded, but not for ever.
    async fn loaded(&mut self) -> Result<(), Trouble> {
        let loaded = async {
            while !self.is_loaded && !self.is_gone {
                self.watch().await;
            }
        };
        let _in_time = tokio::time::timeout(LOADING, loaded).await;
        if self.is_gone { Err(Trouble::Gone) } else { Ok(()) }
    }

    /// Makes what is shown a page of ours: `script` runs where the page's own scripts cannot reach it.
    pub(super) async fn adopt(&mut self, script: &str) -> Result<(), Trouble> {
        let world = json!({ "frameId": self.target, "worldName": WORLD });
        self.world = self.call(To::Page, "Page.createIsolatedWorld", world).await?["executionContextId"].as_i64();
        // By its name it would be added only while the page's console is followed, which costs and is seen by pages.
        let binding = json!({ "name": BINDING, "executionContextId": self.world });
        self.call(To::Page, "Runtime.addBinding", binding).await?;
        self.tell(script).await
    }

    /// Whether what is shown is a page of ours.
    pub(super) fn is_ours(&self) -> bool {
        self.world.is_some()
    }

    /// Evaluates a script among ours. It is refused if the page has been left meanwhile.
    pub(super) async fn tell(&mut self, script: &str) -> Result<(), Trouble> {
        let params = json!({ "expression": script, "contextId": self.world, "silent": true });
        let told = self.call(To::Page, "Runtime.evaluate", params).await;
        if !matches!(&told, Ok(answer) if answer.get("exceptionDetails").is_none()) {
            self.world = None;
        }
        told.map(|_| ())
    }

    async fn ask(&mut self, expression: &str) -> Result<Value, Trouble> {
        let params = json!({ "expression": expression, "returnByValue": true, "silent": true });
        let mut answer = self.call(To::Page, "Runtime.evaluate", params).await?;
        Ok(answer["result"]["value"].take())
    }

    /// Evaluates a script among the page's own, waits for what it promises, and tells the result: a string as it is,
    /// anything else as JSON.
    pub(super) async fn eval(&mut self, script: &str, wait: Duration) -> Result<String, Trouble> {
        let params = json!({ "expression": script, "awaitPromise": true, "returnByValue": true, "silent": true });
        let mut answer = self.call_within(wait, To::Page, "Runtime.evaluate", params).await?;
        if answer.get("exceptionDetails").is_some() {
            return Err(Trouble::Refused);
        }
        // Numbers that JSON does not have are told by name.
        if let Some(number) = answer["result"]["unserializableValue"].as_str() {
            return Ok(number.to_owned());
        }
        Ok(match answer["result"]["value"].take() {
            Value::String(text) => text,
            value => value.to_string(),
        })
    }

    /// Takes a picture, as Base64.
    pub(super) async fn picture(&mut self, picture: &Picture) -> Result<String, Trouble> {
        let metrics = self.call(To::Page, "Page.getLayoutMetrics", json!({})).await?;
        let (seen, device) = (&metrics["cssVisualViewport"], &metrics["layoutViewport"]);
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let (width, height) = (number(&seen["clientWidth"]), number(&seen["clientHeight"]));
        if width < 1.0 || height < 1.0 {
            return Err(Trouble::Refused);
        }
        let pixels = width.max(number(&device["clientWidth"]));
        let scale = (f64::from(picture.max_width) / pixels).min(1.0);
        let (x, y) = (number(&seen["pageX"]), number(&seen["pageY"]));
        let clip = json!({ "x": x, "y": y, "width": width, "height": height, "scale": scale });
        let mut params = json!({ "format": picture.format.name(), "clip": clip });
        if picture.format == Format::Jpeg {
            params["quality"] = picture.quality.into();
        }
        Ok(text(&self.call(To::Page, "Page.captureScreenshot", params).await?["data"]))
    }

    /// Interrupts what keeps the page from answering. `false` if it does not answer even then.
    pub(super) async fn revive(&mut self) -> bool {
        let interrupted = self.call_within(REVIVAL, To::Page, "Runtime.terminateExecution", json!({})).await;
        let asked = json!({ "expression": "0" });
        interrupted.is_ok() && self.call_within(REVIVAL, To::Page, "Runtime.evaluate", asked).await.is_ok()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
