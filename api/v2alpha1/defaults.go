// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import "time"

// DefaultAddressRetain is how long a network that says nothing else keeps an
// address for its pod, the same as in the schema.
const DefaultAddressRetain = 24 * time.Hour

// Defaults of a node config's spec, the same as in the schema.
const (
	DefaultDriverName                   = "networkdriver.cilium.io"
	DefaultDraRegistrationRetryInterval = 1
	DefaultDraRegistrationTimeout       = 5
	DefaultDraRegistrationMaxAttempts   = 10
)

// Default fills in the fields that are not set, as the API server does for
// objects that pass it.
func (s *CiliumNetworkDriverNodeConfigSpec) Default() {
	if s.DriverName == "" {
		s.DriverName = DefaultDriverName
	}
	if s.DraRegistrationRetryInterval == 0 {
		s.DraRegistrationRetryInterval = DefaultDraRegistrationRetryInterval
	}
	if s.DraRegistrationTimeout == 0 {
		s.DraRegistrationTimeout = DefaultDraRegistrationTimeout
	}
	if s.DraRegistrationMaxAttempts == 0 {
		s.DraRegistrationMaxAttempts = DefaultDraRegistrationMaxAttempts
	}
	for i := range s.Pools {
		if s.Pools[i].Claims == "" {
			s.Pools[i].Claims = ClaimsAny
		}
		if s.Pools[i].FaultEffect == "" {
			s.Pools[i].FaultEffect = FaultEffectNoSchedule
		}
	}
}
