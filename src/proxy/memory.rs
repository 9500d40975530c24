//! What large requests, and large messages of apps, keep in memory: so much of each tenant's, and so much in all.

use std::sync::Arc;

use crate::proxy::metrics::Limit;
use crate::proxy::tenants::{Count, Tenant};

/// What is no larger than this is not counted: the number of connections bounds it. So the large requests of some do
/// not keep the small ones of others out.
pub const UNCOUNTED_BYTES: usize = 16 * 1024;

/// Bytes that count among those that a tenant, and everybody, keeps in memory, until this is dropped.
#[derive(Debug)]
pub struct Share {
    bytes: usize,
    tenant: Option<Arc<Tenant>>,
    all: Arc<Count>,
}

/// What is in memory leaves no room for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// The tenant's.
    #[error("Too many bytes of this tenant are in memory (limit: {0} bytes). Retry in 1 s.")]
    Tenant(usize),
    /// Everybody's.
    #[error("Too many bytes are in memory (limit: {0} bytes). Retry in 1 s.")]
    Everybody(usize),
}

impl Share {
    /// Nothing yet, on a tenant's account, if it is one's.
    pub fn new(tenant: Option<&Arc<Tenant>>, all: &Arc<Count>) -> Self {
        Share { bytes: 0, tenant: tenant.cloned(), all: Arc::clone(all) }
    }

    /// As many bytes as that, unless they are few, or it has more already.
    ///
    /// # Errors
    /// [`NoRoom`]; then it is as large as it was.
    pub fn grow_to(&mut self, bytes: usize) -> Result<(), NoRoom> {
        // Most often there is nothing to count, and then nothing that all share is touched.
        if bytes <= UNCOUNTED_BYTES || bytes <= self.bytes {
            return Ok(());
        }
        let more = bytes - self.bytes;
        let own = self.tenant.as_ref().map(|tenant| tenant.request_bytes());
        if let Some(own) = own {
            own.take_some(more).map_err(|full| NoRoom::Tenant(full.limit))?;
        }
        self.all.take_some(more).map_err(|full| {
            if let Some(own) = own {
                own.give_back_some(more);
            }
            NoRoom::Everybody(full.limit)
        })?;
        self.bytes += more;
        Ok(())
    }

    /// What it has, as a share of its own, if it has anything; this one goes on with nothing.
    pub fn split(&mut self) -> Option<Self> {
        let bytes = std::mem::take(&mut self.bytes);
        (bytes > 0).then(|| Share { bytes, tenant: self.tenant.clone(), all: Arc::clone(&self.all) })
    }

    /// Gives everything back.
    pub fn release(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes > 0 {
            if let Some(tenant) = &self.tenant {
                tenant.request_bytes().give_back_some(bytes);
            }
            self.all.give_back_some(bytes);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release();
    }
}

impl NoRoom {
    /// The bound that was met.
    pub fn limit(self) -> Limit {
        match self {
            NoRoom::Tenant(_) => Limit::RequestBytesPerTenant,
            NoRoom::Everybody(_) => Limit::RequestBytes,
        }
    }
}
