//! The task that owns the canvas: it carries out one order after another.
//!
//! It starts the browser when something is to be shown, heeds its events in between, notices when it ends, and ends it
//! when nobody can give orders any more. The A2UI surfaces are kept here, and so outlive the browser.

use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::a2ui::{self, Surfaces};
use super::page::Page;
use super::{Frame, Options, Picture, Trouble, browser};
use crate::node::capabilities::{Image, Response};

/// What is to be done.
pub(super) enum Order {
    /// Show the canvas, with something else in it if that is given.
    Present(Option<Content>, Frame),
    /// Take it away from the user's eyes.
    Hide,
    /// Show what is at an address.
    Navigate(Url),
    /// Evaluate a script.
    Eval(String),
    /// Take a picture.
    Snapshot(Picture),
    /// Apply A2UI messages.
    Push(a2ui::Push),
    /// Remove all A2UI surfaces.
    Reset,
    /// Tell the A2UI surfaces.
    Dump,
}

/// What can be shown.
pub(super) enum Content {
    /// What is at an address.
    Url(Url),
    /// A document.
    Html(String),
}

/// An order, and who waits for it.
pub(super) struct Job {
    /// What is to be done.
    pub(super) order: Order,
    /// Fires when nobody waits any more.
    pub(super) cancel: CancellationToken,
    /// Where what came of it goes.
    pub(super) reply: oneshot::Sender<Response>,
}

/// The canvas.
pub(super) struct Owner {
    options: Options,
    frame: Frame,
    surfaces: Surfaces,
    page: Option<Page>,
}

impl Owner {
    pub(super) fn new(options: Options) -> Self {
        Owner { options, frame: Frame::default(), surfaces: Surfaces::default(), page: None }
    }

    /// Carries out orders until `closing` fires.
    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Job>, closing: CancellationToken) {
        loop {
            let idle = async {
                match &mut self.page {
                    Some(page) => page.watch().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                job = orders.recv() => {
                    let Some(job) = job else { break };
                    if closing.run_until_cancelled(self.work(job)).await.is_none() {
                        break;
                    }
                }
                () = idle => {}
                () = closing.cancelled() => break,
            }
            self.settle().await;
        }
        self.close().await;
    }

    async fn work(&mut self, job: Job) {
        let Job { order, cancel, reply } = job;
        match cancel.run_until_cancelled(self.carry_out(&order)).await {
            Some(response) => _ = reply.send(response),
            None => {
                let _nobody_waits = reply.send(Response::failed("cancelled"));
                self.recover().await;
            }
        }
    }

    /// Reads what the page has told, and lets go of a browser that has ended.
    async fn settle(&mut self) {
        let Some(page) = &mut self.page else { return };
        for report in page.take_reports() {
            self.surfaces.heed(&report);
        }
        if page.is_gone() {
            tracing::info!("the canvas's browser has ended");
            self.close().await;
        }
    }

    async fn close(&mut self) {
        if let Some(page) = self.page.take() {
            page.close().await;
        }
    }

    /// Frees a page that is stuck; its browser ends if that does not help.
    async fn recover(&mut self) {
        if let Some(page) = &mut self.page
            && !page.revive().await
        {
            tracing::warn!("the canvas does not answer, and its browser is ended");
            self.close().await;
        }
    }

    async fn carry_out(&mut self, order: &Order) -> Response {
        let mut outcome = self.attempt(order).await;
        if let Err(trouble) = &outcome
            && order.can_be_repeated(trouble)
        {
            tracing::debug!(?trouble, "the canvas gets another browser");
            self.close().await;
            // What is to be shown is shown by the next browser.
            outcome = self.attempt(order).await;
        }
        let trouble = match outcome {
            Ok(response) => return response,
            Err(trouble) => trouble,
        };
        tracing::debug!(?trouble, "the canvas failed");
        if matches!(trouble, Trouble::Late) {
            self.recover().await;
        }
        order.failure(trouble)
    }

    async fn attempt(&mut self, order: &Order) -> Result<Response, Trouble> {
        Ok(match order {
            Order::Present(content, frame) => {
                self.frame = frame.clone();
                self.present(content.as_ref()).await?;
                Response::done(json!({ "presented": true }))
            }
            Order::Hide => {
                if let Some(page) = &mut self.page {
                    page.hide().await?;
                }
                Response::done(json!({ "hidden": true }))
            }
            Order::Navigate(url) => {
                let navigated = self.open().await?.navigate(url.as_str()).await?;
                let opener = if navigated { "canvas" } else { "unsupported_in_canvas" };
                Response::done(json!({ "navigated": navigated, "opener": opener, "url": url.as_str() }))
            }
            Order::Eval(script) => {
                let wait = self.options.script_timeout;
                let page = self.shown()?;
                Response::done(json!({ "result": page.eval(script, wait).await? }))
            }
            Order::Snapshot(picture) => {
                let page = self.shown()?;
                let (format, base64) = (picture.format.name(), page.picture(picture).await?);
                let image = Image { mime_type: format!("image/{format}"), base64: base64.clone() };
                Response::Done { payload: json!({ "format": format, "base64": base64 }), images: vec![image] }
            }
            Order::Push(push) => {
                let before = self.surfaces.clone();
                if let Err(error) = self.surfaces.push(push) {
                    self.surfaces = before;
                    return Ok(Response::failed(error));
                }
                if let Err(trouble) = self.show_surfaces().await {
                    self.surfaces = before;
                    return Err(trouble);
                }
                Response::done(json!({ "pushed": true }))
            }
            Order::Reset => {
                self.surfaces = Surfaces::default();
                if self.page.as_ref().is_some_and(Page::is_ours) {
                    self.show_surfaces().await?;
                }
                Response::done(json!({ "reset": true }))
            }
            Order::Dump => Response::done(self.surfaces.dump()),
        })
    }

    /// The page, if there is one.
    fn shown(&mut self) -> Result<&mut Page, Trouble> {
        let missing = if browser::program(&self.options).is_some() { Trouble::NotOpen } else { Trouble::NotFound };
        self.page.as_mut().ok_or(missing)
    }

    /// The page, of a browser that is started if there is none.
    async fn open(&mut self) -> Result<&mut Page, Trouble> {
        let page = match self.page.take() {
            Some(page) => page,
            None => {
                let mut page = Page::open(&self.options).await?;
                page.present(&self.frame).await?;
                page
            }
        };
        Ok(self.page.insert(page))
    }

    /// Shows the canvas. What cannot be loaded is no failure: the user sees what the browser says about it.
    async fn present(&mut self, content: Option<&Content>) -> Result<(), Trouble> {
        let is_new = self.page.is_none();
        let frame = self.frame.clone();
        let page = self.open().await?;
        let shown = match content {
            Some(Content::Url(url)) => page.navigate(url.as_str()).await.map(|_| ()),
            Some(Content::Html(html)) => page.show(html, &frame.title).await,
            None if is_new => self.show_surfaces().await,
            None => Ok(()),
        };
        match shown {
            Err(Trouble::Gone) => return Err(Trouble::Gone),
            Err(Trouble::Late) => self.recover().await,
            Err(_) | Ok(()) => {}
        }
        self.open().await?.present(&frame).await
    }

    async fn show_surfaces(&mut self) -> Result<(), Trouble> {
        let (title, state) = (self.frame.title.clone(), self.surfaces.for_page());
        let page = self.open().await?;
        if page.is_ours() {
            // A script may have led the page elsewhere.
            match page.tell(&state).await {
                Ok(()) if page.is_ours() => return Ok(()),
                Ok(()) | Err(Trouble::Refused) => {}
                Err(trouble) => return Err(trouble),
            }
        }
        page.show(a2ui::PAGE, &title).await?;
        page.adopt(a2ui::SCRIPT).await?;
        page.tell(&state).await
    }
}

impl Order {
    /// Whether it may be given to another browser: what the first one has done is gone with it.
    fn can_be_repeated(&self, trouble: &Trouble) -> bool {
        matches!((self, trouble), (_, Trouble::Gone) | (Order::Present(..), Trouble::Late))
    }

    /// What is answered when it fails.
    fn failure(&self, trouble: Trouble) -> Response {
        let what = match (self, trouble) {
            (Order::Eval(_) | Order::Snapshot(_), Trouble::NotFound) => "Canvas not available",
            (Order::Eval(_) | Order::Snapshot(_), Trouble::NotOpen | Trouble::Gone) => {
                "CANVAS_NOT_OPEN: nothing is shown; use canvas.present"
            }
            (Order::Eval(_) | Order::Snapshot(_), Trouble::Late) => "CANVAS_TIMEOUT: the page did not answer in time",
            (Order::Eval(_), _) => "Eval failed",
            (Order::Snapshot(_), _) => "Snapshot failed",
            (_, Trouble::NotFound) => super::NOT_AVAILABLE,
            (Order::Navigate(_), _) => "Navigate failed",
            (Order::Hide, _) => return Response::done(json!({ "hidden": true })),
            (Order::Reset, _) => return Response::done(json!({ "reset": true })),
            (_, Trouble::NotStarted) => "CANVAS_NOT_AVAILABLE: the browser cannot be started",
            (_, _) => "CANVAS_NOT_AVAILABLE: the browser does not answer",
        };
        Response::failed(what)
    }
}
