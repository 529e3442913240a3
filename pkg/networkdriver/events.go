// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"fmt"
	"strings"

	"github.com/cilium/hive/cell"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/health"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/truncate"
)

const (
	// eventRate, per second, limits the events of one cause about one object.
	eventRate = 1. / 60
	// maxEventMessage is the API's limit.
	maxEventMessage = 1024
	// combined is what the library puts before the message where it has made one event of many.
	combined = "(combined from similar events): "
)

// podEvents are the driver's events, about pods most of all. There is one a minute at most for one cause and object.
type podEvents struct {
	client      kubernetes.Interface
	node        string
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
}

var (
	_ attachments.Events = (*podEvents)(nil)
	_ claims.Events      = (*podEvents)(nil)
)

func newPodEvents(client kubernetes.Interface, node string) *podEvents {
	broadcaster := record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: 1, QPS: eventRate, SpamKeyFunc: causeOf}))
	return &podEvents{client, node, broadcaster, broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "cilium-network-driver", Host: node})}
}

// causeOf is the same for events that are one cause's and about one object.
func causeOf(event *corev1.Event) string {
	message := event.Message
	if strings.HasPrefix(message, combined) {
		message = ""
	}
	object := event.InvolvedObject
	return strings.Join([]string{object.Kind, object.Namespace, object.Name, string(object.UID), event.Reason, message}, "\x00")
}

// Run sends events until the context ends.
func (e *podEvents) Run(ctx context.Context, _ cell.Health) error {
	sending := e.broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: e.client.CoreV1().Events("")})
	<-ctx.Done()
	sending.Stop()
	e.broadcaster.Shutdown()
	return nil
}

// Warn implements [attachments.Events].
func (e *podEvents) Warn(s attachments.Sandbox, reason, message string) {
	e.warn(podReference(s.PodNamespace, s.PodName, s.PodUID), reason, message)
}

// WarnClaim implements [claims.Events].
func (e *podEvents) WarnClaim(claim claims.Ref, consumer resourceapi.ResourceClaimConsumerReference, reason, message string) {
	e.warn(&corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
	}, reason, message)
	if claims.IsPod(consumer) {
		e.warn(podReference(claim.Namespace, consumer.Name, consumer.UID), reason, message)
	}
}

// The reasons of events about the health of a pod's device.
const (
	reasonDeviceUnhealthy = "DeviceUnhealthy"
	reasonDeviceHealthy   = "DeviceHealthy"
)

var _ health.Events = (*podEvents)(nil)

// Unhealthy implements [health.Events].
func (e *podEvents) Unhealthy(row *tables.DRAAllocation, message string) {
	e.warn(podReference(row.ClaimNamespace, row.PodName, row.PodUID), reasonDeviceUnhealthy, message)
}

// Healthy implements [health.Events].
func (e *podEvents) Healthy(row *tables.DRAAllocation, message string) {
	e.recorder.Event(podReference(row.ClaimNamespace, row.PodName, row.PodUID), corev1.EventTypeNormal, reasonDeviceHealthy, truncate.UTF8(message, maxEventMessage))
}

// condition makes an event about the node config that a condition of it is another one now.
func (e *podEvents) condition(config *v2alpha1.CiliumNetworkDriverNodeConfig, c metav1.Condition) {
	good := metav1.ConditionTrue
	if c.Type == v2alpha1.ConditionDegraded {
		good = metav1.ConditionFalse
	}
	kind := corev1.EventTypeWarning
	if c.Status == good || c.Reason == reasonGateNotSeen {
		kind = corev1.EventTypeNormal
	}
	object := &corev1.ObjectReference{
		APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.NodeConfigKind, Name: config.Name, UID: config.UID, ResourceVersion: config.ResourceVersion,
	}
	e.recorder.Event(object, kind, c.Reason, truncate.UTF8(fmt.Sprintf("%s is %s: %s", c.Type, c.Status, c.Message), maxEventMessage))
}

// warnNode makes an event about the node, under the UID that kubelet uses in its own.
func (e *podEvents) warnNode(reason, message string) {
	e.warn(&corev1.ObjectReference{Kind: "Node", Name: e.node, UID: kubetypes.UID(e.node)}, reason, message)
}

func (e *podEvents) warn(object *corev1.ObjectReference, reason, message string) {
	e.recorder.Event(object, corev1.EventTypeWarning, reason, truncate.UTF8(message, maxEventMessage))
}

func podReference(namespace, name string, uid kubetypes.UID) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: name, UID: uid}
}
