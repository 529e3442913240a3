// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package helm has the chart that installs the network driver.
package helm

import "embed"

// Name is the chart's name, and its directory in [Chart].
const Name = "cilium-network-driver"

// Chart holds the chart's files.
//
//go:embed all:cilium-network-driver
var Chart embed.FS
